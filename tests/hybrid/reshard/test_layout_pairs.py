"""Layouts into one another on real gloo processes: every shard bit for bit, and every byte counted."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import Weight, model_weights
from tests.hybrid.reshard.gang import Gang
from tests.sync.planned_layouts import uniform_model

NODE = Cluster(devices_per_node=8, nics_per_node=1)
DENSE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 6, "intermediate_size": 80, "vocab_size": 130,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GQA = DENSE | {"num_key_value_heads": 2}
MOE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0],
    "num_key_value_heads": 4,
}  # fmt: skip
# Shards begin at multiples of 256 bytes; so many shards are in none of the models.
ALIGNED = 256 * 200
fsdp, megatron, vllm = ParallelLayout.fsdp, ParallelLayout.megatron, ParallelLayout.vllm
L = 4
NO_EXCHANGE = {
    "pp 2 x tp 2 to tp 4", "pp 2 x tp 2 to tp 2", "pp 2 x tp 4 to tp 8", "ep 4 to tp 4", "ep 2 x tp 2 to ep 4",
    "fsdp 2 to pp 2",
}  # fmt: skip
PAIRS = {
    "fsdp 2 to tp 1": (DENSE, fsdp(2), vllm(replicas=2)),
    "fsdp 2 to tp 2": (DENSE, fsdp(2), vllm(tp=2)),
    "fsdp 4 to tp 4": (DENSE, fsdp(4), vllm(tp=4)),
    "fsdp 8 to tp 8": (DENSE, fsdp(8), vllm(tp=8)),
    "fsdp 4 to two of tp 2": (DENSE, fsdp(4), vllm(tp=2, replicas=2)),
    "fsdp 3 to tp 2, a device more": (DENSE, fsdp(3), vllm(tp=2)),
    "hsdp 2 x 2 to tp 4": (DENSE, fsdp(2, replicate=2), vllm(tp=4)),
    "fsdp 2 x tp 2 to tp 4, two key heads": (GQA, fsdp(2, tp=2), vllm(tp=4)),
    "tp 4 to tp 2": (DENSE, ParallelLayout(tp=4), ParallelLayout(tp=2, replicas=2)),
    "tp 4 to tp 2, fused": (DENSE, ParallelLayout(tp=4, dp=2), vllm(tp=2, replicas=4)),
    "pp 2 x tp 2 to tp 4": (DENSE, megatron(tp=2, pp=2, layers=L), vllm(tp=4)),
    "pp 2 x tp 2 to tp 2": (DENSE, megatron(tp=2, pp=2, layers=L), vllm(tp=2, replicas=2)),
    "pp 2 x tp 4 to tp 8": (DENSE, megatron(tp=4, pp=2, layers=L), vllm(tp=8)),
    "fsdp 8 to tp 8, two key heads": (GQA, fsdp(8), vllm(tp=8)),
    "ep 4 to tp 4": (MOE, megatron(tp=2, dp=2, ep=4, etp=1), vllm(tp=4)),
    "fsdp 4 to ep 4": (MOE, fsdp(4), vllm(tp=4, ep=True)),
    "ep 2 x tp 2 to ep 4": (MOE, megatron(tp=2, dp=2, ep=2, etp=2), vllm(tp=2, dp=2, ep=True)),
    "fsdp 2 to pp 2": (DENSE, fsdp(2), vllm(pp=2, layers=L)),
}


class Gangs:
    """Gangs of every size, made when first wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[int, Gang] = {}

    def of(self, size: int) -> Gang:
        if size not in self._made:
            self._made[size] = Gang(size, self._folder / f"store-{size}")
        return self._made[size]

    def close(self) -> None:
        for gang in self._made.values():
            gang.close()


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    found = Gangs(tmp_path_factory.mktemp("gangs"))
    yield found
    found.close()


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


def plan_of(config: dict[str, Any], train: ParallelLayout, rollout: ParallelLayout, *, best: bool = True) -> Plan:
    return plan_for(model_weights(ModelSpec.from_config(config)), train, rollout, best=best)


def plan_for(weights: list[Weight], train: ParallelLayout, rollout: ParallelLayout, *, best: bool = True) -> Plan:
    if train.ranks == rollout.ranks and best:
        return Plan(weights, train, rollout, best_placement(weights, train, rollout, NODE, together=rollout.tp))
    return Plan(weights, train, rollout, Placement.colocated(NODE, train.ranks, rollout.ranks))


def carried_out(gangs: Gangs, plan: Plan, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Do it, and hold what every switch must hold."""
    bucket = options.setdefault("bucket_nbytes", 64 << 10)
    size = len({*plan.placement.train, *plan.placement.rollout})
    found = gangs.of(size).call("switch", plan=plan, seed=seed, **options)
    pairs: Counter[tuple[int, int]] = Counter()
    for rank, answer in enumerate(found):
        assert not answer["wrong"] and not answer["odd"] and not answer["moved"]
        report = answer["report"]
        assert answer["counted"] == {pair: n for pair, n in report.device_pairs.items() if n}
        assert report.num_all_gather == answer["collectives"]
        sent = {pair: n for pair, n in answer["counted"].items() if pair[0] == rank}
        pairs.update(sent)
        assert report.total_bytes == report.sent_bytes == sum(sent.values())
        assert report.received_bytes == sum(n for pair, n in answer["counted"].items() if pair[1] == rank)
        assert report.received_bytes == answer["lacking"]
        assert answer["again"] == 0
        assert report.peak_extra_bytes <= more_than_held(plan, rank) + report.copied_bytes + bucket + ALIGNED
    planned = sum(pairs.values())
    assert planned == plan.bytes_moved == sum(answer["lacking"] for answer in found)
    for answer in found:
        assert all(pairs[pair] == n for pair, n in answer["counted"].items())  # both ends saw the same
    return found


def more_than_held(plan: Plan, rank: int) -> int:
    """Bytes on a rank at the peak, beside what it holds, as the plan says them."""
    if rank not in plan.placement.rollout:
        return 0
    memory = plan.memory(plan.placement.rollout.index(rank))
    return memory.peak - memory.held


@pytest.mark.parametrize("pair", PAIRS)
def test_every_shard_is_exact_and_only_what_is_missing_travels(gangs: Gangs, pair: str, seed: int) -> None:
    plan = plan_of(*PAIRS[pair])
    messages = carried_out(gangs, plan, seed, gather_below=0)
    collectives = carried_out(gangs, plan, seed, gather_below=math.inf)
    assert not any(answer["report"].num_all_gather for answer in messages)
    assert any(answer["report"].num_all_gather for answer in collectives) == (pair not in NO_EXCHANGE)


@pytest.mark.parametrize(
    "layouts", [(1, 4, 1, 1, 2), (1, 4, 2, 1, 2), (2, 2, 1, 1, 2), (1, 8, 1, 1, 2), (2, 4, 1, 1, 4)]
)
def test_nested_layouts_move_and_keep_what_the_published_table_says(
    gangs: Gangs, layouts: tuple[int, int, int, int, int], seed: int
) -> None:
    """HybridFlow (arXiv 2409.19256), table 2: each rank gets (dg - 1) / tp of the model, and ends with 1 / (tg pg)."""
    p, t, d, pg, tg = layouts
    weights, micro_dp = uniform_model(), p * t // (pg * tg)
    size = sum(weight.nbytes for weight in weights)
    plan = plan_for(
        weights,
        ParallelLayout(tp=t, pp=p, dp=d, layers=L),
        ParallelLayout(tp=tg, pp=pg, replicas=micro_dp * d, layers=L),
    )
    for rank, answer in enumerate(carried_out(gangs, plan, seed)):
        assert answer["report"].received_bytes * t * p == (micro_dp - 1) * size
        assert answer["wanted"] * tg * pg == plan.memory(rank).peak * tg * pg == size


def test_masters_are_cast_before_they_travel(gangs: Gangs, seed: int) -> None:
    carried_out(gangs, plan_of(GQA, fsdp(4), vllm(tp=4)), seed, dtype="float32")


WIDE = GQA | {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 32, "vocab_size": 4096, "num_hidden_layers": 1}


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket", [1 << 20, 64 << 20])
def test_what_leaves_and_lands_where_it_lies(gangs: Gangs, bucket: int, dtype: str, fill: bool, seed: int) -> None:
    """Slices too large to be packed: sent out of either layout's shards, into shards or by way of a bucket."""
    plan = plan_of(WIDE, fsdp(4), vllm(tp=2, replicas=2))
    carried_out(gangs, plan, seed, dtype=dtype, fill=fill, bucket_nbytes=bucket)


def test_rows_that_all_replicas_lack_take_no_memory_beside_the_shards(gangs: Gangs, seed: int) -> None:
    weights = [Weight(f"w{number}", (1024, 512), "BF16") for number in range(4)]
    plan = plan_for(weights, fsdp(4), ParallelLayout(replicas=4))
    for rank, answer in enumerate(carried_out(gangs, plan, seed, dtype="float32", bucket_nbytes=64 << 20)):
        report = answer["report"]
        assert report.peak_extra_bytes == more_than_held(plan, rank) + report.copied_bytes


def test_layouts_that_coincide_move_nothing(gangs: Gangs, seed: int) -> None:
    for layout in (ParallelLayout(tp=4), fsdp(4)):
        for answer in carried_out(gangs, plan_of(DENSE, layout, layout), seed):
            assert answer["report"].num_p2p == answer["report"].num_all_gather == 0
            assert answer["report"].peak_extra_bytes == 0


def test_some_names_alone(gangs: Gangs, seed: int) -> None:
    """What a switch of an adapter is: the others do not move, and are not among the shards."""
    plan = plan_of(DENSE, fsdp(4), ParallelLayout(tp=2, replicas=2))
    names = {weight.name for weight in plan.weights if "q_proj" in weight.name}
    due = sum(t.nbytes for t in plan.transfers() if t.tensor in names and t.link != "device")
    for below in (0, math.inf):
        found = gangs.of(4).call("switch", plan=plan, seed=seed, names=names, gather_below=below)
        assert sum(answer["report"].total_bytes for answer in found) == due
        for answer in found:
            assert set(answer["odd"]) == {weight.name for weight in plan.weights} - names
            assert not set(answer["wrong"]) & names
