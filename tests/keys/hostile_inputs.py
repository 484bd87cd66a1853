"""Checkpoints that someone damaged or forged: valid ones, changed where their structure says it hurts.

``damage(folder, rng)`` builds a small valid checkpoint of a random kind in ``folder``, spoils it, and says what it
did. Kinds: safetensors, index, config, adapter, dcp, torch_file, megatron, file_kinds.
"""

from __future__ import annotations

import io
import json
import os
import random
import warnings
from collections.abc import Callable
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
from tests.keys.spoiling import WORDS, spoil_archive, spoil_bytes, spoil_json, spoil_pickle


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
    _unpack(files, folder)
    return f"{victim}: {what}"


def _unpack(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


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
    _unpack(files, folder)
    return f"{name}: {what}"


def _torch_file(folder: Path, rng: random.Random) -> str:
    buffer = io.BytesIO()
    torch.save({"state": dict(odd_tensors()), "step": 1}, buffer)
    data, what = spoil_archive(buffer.getvalue(), rng)
    (folder / rng.choice(["pytorch_model.bin", "model_world_size_1_rank_0.pt"])).write_bytes(data)
    return what


def _file_kinds(folder: Path, rng: random.Random) -> str:
    build = rng.choice([lambda: write_model(folder, model_tensors()), lambda: _unpack(_megatron_files(), folder),
                        lambda: _unpack(_dcp_files(), folder)])  # fmt: skip
    build()
    victim = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kinds: dict[str, Callable[[], Any]] = {
        "pipe": lambda: os.mkfifo(victim), "folder": victim.mkdir, "loop": lambda: victim.symlink_to(victim.name),
        "dangling": lambda: victim.symlink_to("nothing"), "device": lambda: victim.symlink_to("/dev/zero"),
        "out": lambda: victim.symlink_to("/etc/hostname"), "absent": lambda: None,
    }  # fmt: skip
    what = rng.choice(list(kinds))
    victim.unlink()
    kinds[what]()
    return f"{victim.name} is {what}"
