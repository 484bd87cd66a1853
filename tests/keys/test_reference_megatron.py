"""Megatron-core's own GPTModel loads our rank folders strictly, agrees with transformers, and its own checkpoints load.

On the CPU, at tensor-parallel size 1 and 2 over gloo, with Megatron's own ("local") modules.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.keys.convert import Conversion, prepare
from tests.keys.megatron_ranks import DISTRIBUTED
from tests.keys.tiny_models import MODELS, add_prediction_layer, logits, save
from tests.warm_starts import start_module

HELD = [*MODELS, "deepseek_v3"]
PREDICTING = "deepseek_v3-predicting"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model, converted for two sizes and run by two ranks of Megatron-core."""
    work = tmp_path_factory.mktemp("megatron")
    for name in (*HELD, PREDICTING):
        folder = work / name
        model = save(name.partition("-")[0], folder / "hf", shard="1GB")
        torch.save(logits(model), folder / "right.pt")
        if name == PREDICTING:
            add_prediction_layer(folder / "hf")
        for tp in (1, 2):
            prepare(Conversion(folder / "hf", "megatron", tp=tp, modules="local")).write(folder / f"tp{tp}")
    port = free_port()
    ranks = [
        start_module(
            "tests.keys.megatron_ranks",
            [str(rank), "2", str(port), str(work)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][-3000:] + said[1][-1000:]
    return work


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_type", HELD)
def test_megatron_core_loads_and_agrees(work: Path, model_type: str, tp: int) -> None:
    right = torch.load(work / model_type / "right.pt", weights_only=True)
    ours = torch.load(work / model_type / f"logits{tp}.pt", weights_only=True)
    assert right.abs().max() > 0.1
    assert (ours - right).abs().max() <= 1e-4


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_core_loads_a_multi_token_prediction_layer(work: Path, tp: int) -> None:
    assert (work / PREDICTING / f"loaded{tp}").exists()


@pytest.mark.parametrize("model_type", DISTRIBUTED)
def test_megatron_cores_own_checkpoint_converts_back(work: Path, model_type: str, tmp_path: Path) -> None:
    folder = work / model_type
    prepared = prepare(Conversion(folder / "dist", "hf", base=folder / "hf"))
    assert prepared.source_scheme == "megatron-dist"
    prepared.write(tmp_path / "back", verify=True)
    source, back = (load_file(path / "model.safetensors") for path in (folder / "hf", tmp_path / "back"))
    assert source.keys() == back.keys()
    assert all(torch.equal(source[name], back[name]) for name in source)
