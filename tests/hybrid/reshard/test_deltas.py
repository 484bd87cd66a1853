"""Switches in which only what changed travels."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.weights import model_weights
from tests.hybrid.reshard.gang import Gang
from tests.hybrid.reshard.test_layout_pairs import DENSE, plan_for, plan_of

WIDE = DENSE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "vocab_size": 1000}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    with Gang(4, tmp_path_factory.mktemp("gang") / "store") as found:
        yield found


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_switches_with_deltas_are_exact(gang: Gang, share: float, seed: int) -> None:
    plan = plan_of(WIDE, ParallelLayout.fsdp(4), ParallelLayout.vllm(tp=2, replicas=2))
    found = gang.call("drift", plan=plan, seed=seed, share=share)
    for answer in found:
        assert answer["wrong"] == []
        _, *later = answer["reports"]
        for report in later:
            assert report.kept_bytes == answer["kept"] > 0
            assert report.control_bytes <= 8 * report.num_p2p
    full, *later = (sum(a["reports"][n].total_bytes for a in found) for n in range(4))
    assert full == plan.bytes_moved
    assert sum(sum(a["counted"].values()) for a in found) // 2 == full + sum(later) + sum(
        report.control_bytes for a in found for report in a["reports"]
    )
    for moved in later:
        assert moved <= full * {0.0: 0.01, 0.01: 0.05, 1.0: 1.0}[share]


def test_after_adamw_steps_at_a_small_rate_a_twentieth_travels(gang: Gang, seed: int) -> None:
    """fp32 masters off the bf16 grid, third step at lr 1e-6."""
    weights = model_weights(ModelSpec.from_config(WIDE))
    plan = plan_for(weights, ParallelLayout.fsdp(4), ParallelLayout.vllm(tp=2, replicas=2))
    found = gang.call("train", plan=plan, seed=seed, steps=3, lr=1e-6)
    assert not any(answer["wrong"] for answer in found)
    first, *_, last = (sum(a["reports"][n].total_bytes for a in found) for n in range(4))
    assert first == plan.bytes_moved
    assert last <= 0.05 * first
