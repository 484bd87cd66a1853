"""Checkpoints that someone damaged or forged: valid ones, changed where their structure says it hurts.

``damage(folder, rng)`` builds a small valid checkpoint of a random kind in ``folder``, spoils it, and says what it
did. Kinds: safetensors, index, config, adapter, dcp, torch_file, megatron, file_kinds.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import tensor_shapes

WORDS: list[Any] = [
    None, True, -1, 0, 1, 3, 7, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, "", "x", "F32", "F64", "F4",
    "BF16", "llama", "../up.safetensors", "/etc/passwd", "a\0b", "x" * 5000, "é\u202e", "\ud800", [], {}, [[]], [0],
    [1, -1], [2**40, 2**40], {"a": {}}, "__metadata__", "model.safetensors.index.json", ".", "/dev/zero",
]  # fmt: skip
EVIL = [
    b"cos\nsystem\n(X\x04\x00\x00\x00trueR", b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R",
    b"cnumpy.core.multiarray\n_reconstruct\n)R", b"cposix\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(" * 3000,
    b"r\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"h\x00h\x00\x86q\x00" * 50, b"\x8d" + b"\xff" * 8,
]  # fmt: skip


def damage(folder: Path, rng: random.Random) -> tuple[str, str]:
    """Fill the empty ``folder`` with a spoilt checkpoint; return its kind and a description of the damage."""
    kinds = [_safetensors, _safetensors, _index, _config, _adapter, _dcp, _torch_file, _megatron, _file_kinds]
    kind = rng.choice(kinds)
    return kind.__name__.removeprefix("_"), kind(folder, rng)


def write_model(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 2) -> list[Path]:
    """Write a valid model of CONFIG and return its shards."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map, files = {}, []
    for i in range(shards):
        file = folder / f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({n: tensors[n] for n in part}, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file.name))
        files.append(file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return files


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 4, "vocab_size": 6,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
ADAPTER_CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": False, "use_dora": False,
    "rank_pattern": {"q_proj": 2}, "alpha_pattern": {}, "bias": "none", "modules_to_save": None,
    "task_type": "CAUSAL_LM", "fan_in_fan_out": False, "init_lora_weights": True, "target_parameters": None,
}  # fmt: skip


ADAPTED = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


@cache
def model_tensors() -> dict[str, torch.Tensor]:
    """The tensors of CONFIG's model."""
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(ModelSpec.from_config(CONFIG))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@cache
def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind of shape and several types."""
    return {
        "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3), "model.norm.weight": torch.ones(3).bfloat16(),
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(2, dtype=torch.int64), "odd": torch.ones(5).to(torch.uint8),
    }  # fmt: skip


def _safetensors(folder: Path, rng: random.Random) -> str:
    tensors = rng.choice([model_tensors, odd_tensors])()
    target = rng.choice(write_model(folder, tensors, shards=rng.choice([1, 2])))
    data = target.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        text, what = spoil_json(json.loads(data[8 : 8 + length]), rng)
        prefix = len(text) if rng.random() < 0.9 else rng.choice([0, 1, len(text) + 1, 2**27, 2**63, 2**64 - 1])
        data = prefix.to_bytes(8, "little") + text + data[8 + length :]
    else:
        data, what = spoil_bytes(data, rng, within=rng.choice([8, 8 + length, len(data)]))
    target.write_bytes(data)
    return what


def _index(folder: Path, rng: random.Random) -> str:
    write_model(folder, model_tensors())
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if rng.random() < 0.5:
        name = rng.choice(list(index["weight_map"]))
        index["weight_map"][name] = rng.choice([w for w in WORDS if isinstance(w, str) and "\ud800" not in w])
        path.write_text(json.dumps(index))
        return f"weight_map[{name}] = {index['weight_map'][name]!r:.50}"
    text, what = spoil_json(index, rng)
    path.write_bytes(text)
    return what


def _config(folder: Path, rng: random.Random) -> str:
    write_model(folder, model_tensors())
    text, what = spoil_json(CONFIG, rng)
    (folder / "config.json").write_bytes(text)
    return what


def _adapter(folder: Path, rng: random.Random) -> str:
    lora = {ADAPTED.format(layer, "A"): torch.ones(2, 8) for layer in (0, 1)}
    lora |= {ADAPTED.format(layer, "B"): torch.ones(8, 2) for layer in (0, 1)}
    file = folder / "adapter_model.safetensors"
    save_file(lora, file, metadata={"format": "pt"})
    text, what = spoil_json(ADAPTER_CONFIG, rng)
    if rng.random() < 0.3:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, what = spoil_json(json.loads(data[8 : 8 + length]), rng)
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        text = json.dumps(ADAPTER_CONFIG).encode()
    (folder / "adapter_config.json").write_bytes(text)
    return what


@cache
def _megatron_files() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        write_model(Path(folder) / "hf", model_tensors())
        prepare(Conversion(Path(folder) / "hf", "megatron", tp=2, ep=2)).write(Path(folder) / "mg", durable=False)
        files = [path for path in (Path(folder) / "mg").rglob("*") if path.is_file()]
        return {str(path.relative_to(Path(folder) / "mg")): path.read_bytes() for path in files}


def _megatron(folder: Path, rng: random.Random) -> str:
    files = dict(_megatron_files())
    victim = rng.choice(list(files))
    if rng.random() < 0.15:
        what = "absent"
        del files[victim]
    elif victim.endswith(".json"):
        files[victim], what = spoil_json(json.loads(files[victim]), rng)
    elif victim.endswith(".pt"):
        files[victim], what = spoil_archive(files[victim], rng)
    else:
        files[victim], what = spoil_bytes(files[victim], rng, within=len(files[victim]))
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return f"{victim}: {what}"


@cache
def _dcp_files() -> dict[str, bytes]:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(odd_tensors()), "step": 3}, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _dcp(folder: Path, rng: random.Random) -> str:
    files = dict(_dcp_files())
    name = rng.choice([".metadata", ".metadata", *files])
    if name == ".metadata":
        files[name], what = spoil_pickle(files[name], rng)
    else:
        files[name], what = spoil_bytes(files[name], rng, within=len(files[name]))
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return f"{name}: {what}"


def _torch_file(folder: Path, rng: random.Random) -> str:
    buffer = io.BytesIO()
    torch.save({"state": dict(odd_tensors()), "step": 1}, buffer)
    data, what = spoil_archive(buffer.getvalue(), rng)
    (folder / rng.choice(["pytorch_model.bin", "model_world_size_1_rank_0.pt"])).write_bytes(data)
    return what


def spoil_archive(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damage the pickle inside a file of torch.save, or the bytes of the archive."""
    if rng.random() < 0.4:
        return spoil_bytes(data, rng, within=len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(n for n in records if n.endswith("data.pkl"))
    records[name], what = spoil_pickle(records[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return out.getvalue(), what


def _file_kinds(folder: Path, rng: random.Random) -> str:
    files = write_model(folder, model_tensors())
    victims = [*files, folder / "config.json", folder / "model.safetensors.index.json"]
    victim = rng.choice(victims)
    kinds: dict[str, Callable[[], Any]] = {
        "pipe": lambda: os.mkfifo(victim), "folder": victim.mkdir, "loop": lambda: victim.symlink_to(victim.name),
        "dangling": lambda: victim.symlink_to("nothing"), "device": lambda: victim.symlink_to("/dev/zero"),
        "out": lambda: victim.symlink_to("/etc/hostname"), "absent": lambda: None,
    }  # fmt: skip
    what = rng.choice(list(kinds))
    victim.unlink()
    kinds[what]()
    return f"{victim.name} is {what}"


def spoil_json(value: Any, rng: random.Random) -> tuple[bytes, str]:
    """Change, remove or double one to three places of a JSON value, or its text; return the text and what was done."""
    value = json.loads(json.dumps(value))
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            break
        parent, key = rng.choice(places)
        if rng.random() < 0.15:
            del parent[key]
            done.append(f"without {key!r:.40}")
            continue
        new = deepcopy(rng.choice(WORDS))
        if isinstance(parent, dict) and rng.random() < 0.15:
            parent[str(new)] = parent.pop(key)
            done.append(f"{key!r:.40} renamed {new!r:.40}")
        else:
            parent[key] = new
            done.append(f"{key!r:.40} = {str(new)[:40]!r}")
    text = json.dumps(value)
    choice = rng.random()
    if choice < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + ", " + text[1:]
        done.append("all doubled")
    elif choice < 0.1:
        text = text.replace("[", "[" * 3000, 1)
        done.append("nested")
    elif choice < 0.15:
        text = text.replace("1", "NaN", 1)
        done.append("NaN")
    return text.encode("utf-8", "surrogatepass"), "; ".join(done)


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def spoil_bytes(data: bytes, rng: random.Random, *, within: int) -> tuple[bytes, str]:
    """Cut, grow, flip, overwrite or repeat bytes, mostly among the first ``within``."""
    at = rng.randrange(max(min(within, len(data)), 1))
    what = rng.choice(["cut", "grow", "flip", "fill", "insert", "repeat"])
    if what == "cut":
        data = data[: rng.choice([at, rng.randrange(len(data) + 1)])]
    elif what == "grow":
        data += bytes(rng.randint(1, 50))
    elif what == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 4, 16])):
            changed[rng.randrange(max(min(within, len(data)), 1))] ^= 1 << rng.randrange(8)
        data = bytes(changed)
    elif what == "fill":
        count = rng.choice([1, 2, 4, 8])
        data = data[:at] + bytes([rng.choice([0, 127, 255])]) * count + data[at + count :]
    elif what == "insert":
        data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
    else:
        data = data[:at] + data[at // 2 : at] + data[at:]
    return data, f"{what} at {at}"


def spoil_pickle(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Splice an attack into a pickle, change a number or a word of it, or damage its bytes."""
    choice = rng.random()
    if choice < 0.4:
        at, evil = rng.randrange(len(data)), rng.choice(EVIL)
        return data[:at] + evil + data[at:], f"spliced {evil[:12]!r} at {at}"
    if choice < 0.5:
        return pickle.dumps(rng.choice([w for w in WORDS if w != "\ud800"]), rng.randint(2, 5)), "another value"
    if choice < 0.7:
        old = rng.choice(
            [b"K\x00", b"K\x03", b"K\x05", b".distcp", b"float32", b"offset", b"Metadata", b"storage", b"cpu"]
        )
        new = rng.choice(
            [b"K\xff", b"N", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"../..xy", b"float64", b"\x89", b""]
        )
        at = data.find(old, rng.randrange(len(data)))
        at = at if at >= 0 else data.find(old)
        return data[:at] + new + data[at + len(old) :] if at >= 0 else data[:-1], f"{old!r} -> {new!r}"
    return spoil_bytes(data, rng, within=len(data))
