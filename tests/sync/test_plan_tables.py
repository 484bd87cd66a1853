"""The transfer plan against published figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlctl.keys.presets import preset
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import model_weights
from tests.sync.planned_layouts import NODES, uniform_model


def combinations() -> Iterator[tuple[int, int, int, int, int]]:
    for p in (1, 2, 4):
        for t in (1, 2, 4, 8):
            for d in (1, 2):
                for pg in (1, 2, 4):
                    for tg in (1, 2, 4, 8):
                        if p % pg == 0 and t % tg == 0 and 1 < p * t * d <= 32:
                            yield p, t, d, pg, tg


HYBRID = list(combinations())


def test_there_are_thirty_layouts() -> None:
    assert len(HYBRID) >= 30


@pytest.mark.parametrize(("p", "t", "d", "pg", "tg"), HYBRID)
def test_nested_layouts_reproduce_the_3d_hybrid_engine_table(p: int, t: int, d: int, pg: int, tg: int) -> None:
    """HybridFlow (arXiv 2409.19256), table 2: volume, peak and redundancy of its engine and of its two baselines."""
    weights = uniform_model()
    size = sum(w.nbytes for w in weights)
    ranks, micro_dp = p * t * d, p * t // (pg * tg)
    cluster = Cluster(8, 8)
    train = ParallelLayout(tp=t, pp=p, dp=d, layers=4)
    engine = ParallelLayout(tp=tg, pp=pg, replicas=micro_dp * d, layers=4)
    plan = Plan(weights, train, engine, best_placement(weights, train, engine, cluster))
    for rank in range(ranks):
        memory = plan.memory(rank)
        received = sum(int(plan.traffic.received[k][rank]) for k in ("node", "network"))
        assert received * tg * pg * t * p == (t * p - tg * pg) * size == (micro_dp - 1) * tg * pg * size
        assert memory.peak * tg * pg == size
        assert memory.redundant == 0

    # DS-Chat gathers the whole model from ZeRO-3 shards over all ranks, HybridFlow-V from the tp x pp ranks.
    whole = ParallelLayout(replicas=ranks, layers=4)
    for layout, parts in ((ParallelLayout(dp=ranks, shard=ranks), ranks), (train, t * p)):
        if 64 % ranks == 0:
            baseline = Plan(weights, layout, whole, Placement.colocated(cluster, ranks, ranks))
            for rank in range(ranks):
                moved = sum(int(baseline.traffic.received[k][rank]) for k in ("node", "network"))
                assert moved * parts == (parts - 1) * size
                assert baseline.memory(rank).peak == size
                assert baseline.memory(rank).held * parts == size  # kept beside the gathered copy: the redundancy


def test_the_worked_case_of_the_paper() -> None:
    """1-4-2 to 1-2-2-2: with its groups [0,2] [1,3] [4,6] [5,7] each rank receives 1/4 of the model, as planned."""
    weights = uniform_model()
    size = sum(w.nbytes for w in weights)
    train, engine = ParallelLayout(tp=4, dp=2, layers=4), ParallelLayout(tp=2, replicas=4, layers=4)
    papers = Plan(weights, train, engine, Placement(NODES, tuple(range(8)), (0, 2, 1, 3, 4, 6, 5, 7)))
    best = Plan(weights, train, engine, best_placement(weights, train, engine, NODES))
    assert papers.bytes_moved == best.bytes_moved == 8 * size // 4
    naive = Plan(weights, train, engine, Placement.colocated(NODES, 8, 8))
    assert naive.bytes_moved > best.bytes_moved


def test_fsdp_to_tp_of_qwen2() -> None:
    weights = model_weights(preset("qwen2-1.5b"))
    size = sum(w.nbytes for w in weights)
    train, engine = ParallelLayout.fsdp(8), ParallelLayout.vllm(tp=2, replicas=4)
    cluster = Cluster(8, 1)
    best = Plan(weights, train, engine, best_placement(weights, train, engine, cluster, together=2))
    assert best.bytes_moved / 8 / size == pytest.approx(0.393, abs=0.001)
    plain = Plan(weights, train, engine, Placement.colocated(cluster, 8, 8))
    assert best.bytes_moved < plain.bytes_moved
