"""The executor on real files: every scheme's bytes, one tensor of memory, checksums, and verification that fails."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.compose import compose
from rlctl.keys.execute import execute, verify
from rlctl.keys.layout import Layout, Ref
from rlctl.keys.live import convert_tensors
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import Plan, PlanError
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.sinks import MegatronSink, SafetensorsSink, shard_layout
from rlctl.keys.stored_tensors import StoredTensors
from tests.keys.random_models import configs, grids, random_tensors, same_bits


def stored(folder: Path) -> StoredTensors:
    checkpoint = Checkpoint.open(folder)
    checkpoint.check()
    return StoredTensors.of({Ref(name): entry for name, entry in checkpoint.entries.items()})


def save_sharded(tensors: dict[str, torch.Tensor], folder: Path, parts: int) -> None:
    folder.mkdir()
    names = list(tensors)
    for part in range(parts):
        chosen = {name: tensors[name] for name in names[part::parts]}
        save_file(chosen, folder / f"model-{part + 1:05d}-of-{parts:05d}.safetensors", metadata={"format": "pt"})


def write(plan: Plan, source: StoredTensors, folder: Path, limit: int | None = None) -> StoredTensors:
    folder.mkdir()
    execute(plan, source, SafetensorsSink(folder, shard_layout(plan, source, limit)))
    return stored(folder)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_files_hold_what_live_tensors_give(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("execute")
    spec = ModelSpec.from_config(data.draw(configs()))
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, data.draw(st.integers(0, 2**31)))
    save_sharded(tensors, folder / "hf", 3)
    hf = hf_layout(spec, shapes)
    with stored(folder / "hf") as source:
        plan = compose(hf, megatron_layout(spec, shapes, Grid(**data.draw(grids(spec)))), source.infos)
        execute(plan, source, MegatronSink(folder / "megatron", plan))
        right = dict(convert_tensors(plan, tensors))
        for rank in {ref.shard for ref in right}:
            file = folder / "megatron" / rank / "model_optim_rng.pt"
            assert zipfile.ZipFile(file).testzip() is None
            loaded = torch.load(file, weights_only=True)
            assert loaded["checkpoint_version"] == 3.0
            assert loaded["model"].keys() == {ref.name for ref in right if ref.shard == rank}
            assert all(same_bits(t, right[Ref(name, rank)]) for name, t in loaded["model"].items())

        plan = compose(hf, fused_layout(spec, shapes), source.infos)
        limit = data.draw(st.sampled_from([None, 64]))
        with write(plan, source, folder / "fused", limit) as written:
            verify(plan, source, written)
            right = dict(convert_tensors(plan, tensors))
            assert all(same_bits(written.read(ref, _all(t)), t) for ref, t in right.items())


def _all(tensor: torch.Tensor) -> Any:
    from rlctl.keys.boxes import whole

    return whole(tuple(tensor.shape))


def dense(**changes: Any) -> tuple[ModelSpec, Layout]:
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 4, "vocab_size": 10}  # fmt: skip
    spec = ModelSpec.from_config(config | changes)
    return spec, hf_layout(spec, canonical_shapes(spec))


def test_a_rename_keeps_the_shards_and_casts_keep_odd_tensors(tmp_path: Path) -> None:
    spec, hf = dense()
    tensors = random_tensors(canonical_shapes(spec), 3)
    save_sharded(tensors, tmp_path / "hf", 4)
    with stored(tmp_path / "hf") as source:
        with write(compose(hf, hf, source.infos), source, tmp_path / "same"):
            names = [load_file(f).keys() for f in sorted((tmp_path / "hf").glob("*.safetensors"))]
            assert names == [load_file(f).keys() for f in sorted((tmp_path / "same").glob("*.safetensors"))]
        plan = compose(hf, hf, source.infos, dtype="F32", keep_dtype=frozenset({"model.norm.weight"}))
        with write(plan, source, tmp_path / "wide") as written:
            verify(plan, source, written)
            name = "model.layers.1.mlp.up_proj.weight"
            assert torch.equal(written.read(Ref(name), _all(tensors[name])), tensors[name].float()) or bool(
                tensors[name].isnan().any()
            )
            assert {written.infos[Ref(n)].dtype for n in ("model.norm.weight", name)} == {"BF16", "F32"}


def test_verification_sees_one_changed_bit(tmp_path: Path) -> None:
    spec, hf = dense()
    save_sharded(random_tensors(canonical_shapes(spec), 4), tmp_path / "hf", 1)
    with stored(tmp_path / "hf") as source:
        plan = compose(hf, hf, source.infos)
        with write(plan, source, tmp_path / "out") as written:
            entry = written.entry(Ref("model.layers.1.mlp.up_proj.weight"))
            assert entry is not None
            content = bytearray(entry.file.read_bytes())
            content[entry.offset + 3] ^= 1
            entry.file.write_bytes(content)
            with pytest.raises(PlanError, match=r"layers\.1\.mlp\.up_proj\.weight: differs in the output"):
                verify(plan, source, written)


_MEASURE = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.keys.test_execute import *
spec, hf = dense(hidden_size=2048, intermediate_size=6144, vocab_size=2, num_hidden_layers=3)
shapes = canonical_shapes(spec)
grid = Grid(tp=2, vocab_multiple=1)
folder = Path(sys.argv[1])
with stored(folder / "hf") as source:
    plan = compose(hf, megatron_layout(spec, shapes, grid), source.infos, dtype=sys.argv[2])
    sink = MegatronSink(folder / sys.argv[2], plan)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    execute(plan, source, sink)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", [pytest.param("BF16", marks=pytest.mark.slow), "F32"])
def test_memory_is_one_tensor(tmp_path: Path, dtype: str) -> None:
    spec, _ = dense(hidden_size=2048, intermediate_size=6144, vocab_size=2, num_hidden_layers=3)
    shapes = canonical_shapes(spec)
    save_sharded({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}, tmp_path / "hf", 2)
    out = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), dtype], capture_output=True, text=True, check=True, timeout=100
    )
    largest = 6144 * 2048 * (2 if dtype == "BF16" else 4)
    print(f"largest tensor {largest >> 20} MiB, extra memory {int(out.stdout) >> 10} MiB")
    assert int(out.stdout) * 1024 <= largest + (64 << 20)
