"""Mixtures of experts, which vLLM keeps in another form than they are sent in, take new weights too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.sync.report import SyncError
from tests.rollout.vllm.house import House
from tests.rollout.vllm.tiny_engines import TinyModel, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_experts_are_packed_again(tmp_path: Path) -> None:
    """vLLM keeps them in the order of its kernels, and a tied head in two places: its own reload has to do."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with vllm_environment(tmp_path / "path"):
        house = House(tmp_path / "model", TinyModel(kind="Qwen3Moe", **sizes))
        stacked = "model.layers.1.mlp.experts.gate_up_proj"
        assert stacked in house.model.tensors()
        for commit in ("inplace", "staged"):
            manager = house.manager("gloo", commit=commit, attempts=1)
            for _ in range(2):
                manager.sync(house.change())
                house.assert_serves_the_model(readable=False)
            house.model.leave_out = {stacked}
            with pytest.raises(SyncError, match=rf"untouched 1 \({stacked}\)"):
                manager.sync(house.change())
            house.model.leave_out, house.model.add = set(), {"model.layers.9.mlp.gate.weight": torch.ones(2)}
            with pytest.raises(SyncError, match=r"unknown 1, untouched 0 \(model.layers.9.mlp.gate.weight\)"):
                manager.sync(house.change())
            house.model.add = {}
            manager.sync(house.change())
            house.assert_serves_the_model(readable=False)
        with pytest.raises(RlctlError, match="cannot be read back: vLLM may keep experts"):
            house.replica.digests()
        house.close()
