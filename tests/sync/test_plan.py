"""The transfer plan, element by element against brute force."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset
from rlctl.sync.boxes import Box, disjoint_cells, intersect, is_flat, slices, volume
from rlctl.sync.layout import Layout, ParallelLayout, Share, TableLayout
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan, best_placement
from rlctl.sync.weights import Weight, model_weights
from tests.sync.layout_models import FAMILIES, Array, EngineRank, held_tensors, numbered, small_spec
from tests.sync.planned_layouts import NODES, uniform_model


def random_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    return tuple(tuple(sorted(rng.sample(range(n + 1), 2))) for n in shape)  # type: ignore[misc]


def random_table(weights: list[Weight], ranks: int, rng: random.Random, *, cover: bool) -> TableLayout:
    """Random, overlapping parts, at most one a rank; ``cover`` adds a holder of everything."""
    table: dict[str, list[Share]] = {}
    for weight in weights:
        shares: dict[Box, list[int]] = {}
        holder = rng.randrange(ranks)
        for rank in range(ranks):
            if cover and rank == holder:
                shares.setdefault(tuple((0, n) for n in weight.shape), []).append(rank)
            elif rng.random() < 0.8:
                shares.setdefault(random_box(weight.shape, rng), []).append(rank)
        table[weight.name] = [Share(box, tuple(r)) for box, r in shares.items()]
    return TableLayout(ranks, table)


def elements(layout: Layout, weight: Weight, rank: int, full: Array) -> set[int]:
    return {int(x) for s in layout.shares(weight) if rank in s.ranks for x in full[slices(s.box)].ravel()}


def brute_force_bound(weights: list[Weight], train: Layout, rollout: Layout, place: Placement) -> int:
    total = 0
    full = numbered(weights)
    for dst, device in enumerate(place.rollout):
        own = place.train.index(device) if device in place.train else -1
        for weight in weights:
            wanted = elements(rollout, weight, dst, full[weight.name])
            held = elements(train, weight, own, full[weight.name]) if own >= 0 else set()
            total += len(wanted - held) * weight.nbytes // weight.elements
    return total


def random_placement(train: int, rollout: int, rng: random.Random) -> Placement:
    devices = list(range(max(train, rollout) + rng.randint(0, min(train, rollout))))
    return Placement(NODES, tuple(rng.sample(devices, train)), tuple(rng.sample(devices, rollout)))


@pytest.mark.parametrize("seed", range(40))
def test_any_two_layouts_move_the_lower_bound_and_fill_everything_once(seed: int) -> None:
    rng = random.Random(seed)
    weights = [
        Weight(f"w{i}", tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3))), rng.choice(["BF16", "F32", "I8"]))
        for i in range(6)
    ]
    train = random_table(weights, rng.randint(1, 5), rng, cover=True)
    rollout = random_table(weights, rng.randint(1, 5), rng, cover=False)
    place = random_placement(train.ranks, rollout.ranks, rng)
    plan = Plan(weights, train, rollout, place)
    assert plan.bytes_moved == brute_force_bound(weights, train, rollout, place)

    full = numbered(weights)
    local = [
        {w.name: np.full([b - a for a, b in s.box], -1) for w in weights for s in rollout.shares(w) if r in s.ranks}
        for r in range(rollout.ranks)
    ]
    itemsize = {w.name: w.nbytes // w.elements for w in weights}
    for t in plan.transfers():
        source = held_tensors(weights, train, t.src, full)[t.src_tensor][slices(t.src_box)]
        target = local[t.dst][t.dst_tensor][(*slices(t.dst_box), ...)]
        assert (target == -1).all()  # nothing is written twice
        target[...] = source
        assert t.nbytes == source.size * itemsize[t.tensor]
    for rank, tensors in enumerate(local):
        for weight in weights:
            for share in rollout.shares(weight):
                if rank in share.ranks:
                    assert (tensors[weight.name] == full[weight.name][slices(share.box)]).all()


def random_train(spec_layers: int, rng: random.Random) -> ParallelLayout:
    tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    kind = rng.choice(["fsdp", "hsdp", "megatron", "ep", "plain"])
    if kind == "fsdp":
        return ParallelLayout.fsdp(rng.choice([1, 2, 3, 5]), tp=tp)
    if kind == "hsdp":
        return ParallelLayout.fsdp(rng.choice([2, 3]), tp=rng.choice([1, 2]), replicate=2)
    if kind == "megatron":
        return ParallelLayout.megatron(tp=tp, pp=pp, dp=rng.choice([1, 2]), layers=spec_layers)
    if kind == "ep":
        return ParallelLayout.megatron(tp=2, pp=pp, dp=2, ep=rng.choice([2, 4]), etp=1, layers=spec_layers)
    return ParallelLayout(tp=tp, dp=4, shard=2, stacked_experts=rng.random() < 0.5)


def random_engine(spec_layers: int, rng: random.Random) -> ParallelLayout:
    return ParallelLayout.vllm(
        tp=rng.choice([1, 2, 4]), pp=rng.choice([1, 1, 2]), dp=rng.choice([1, 2]), ep=rng.random() < 0.5,
        replicas=rng.choice([1, 2]), layers=spec_layers,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_shards_become_vllm_ranks(family: str, seed: int) -> None:
    """Executed on numbered elements: every rollout rank ends with the tensors that vLLM's own rules give it."""
    rng = random.Random(f"{family}-{seed}")
    spec = small_spec(family, rng)
    weights = model_weights(spec)
    full = numbered(weights)
    train, engine = random_train(spec.layers, rng), random_engine(spec.layers, rng)
    place = random_placement(train.ranks, engine.ranks, rng)
    plan = Plan(weights, train, engine, place)
    if train.ranks * engine.ranks <= 32:
        assert plan.bytes_moved == brute_force_bound(weights, train, engine, place)
    held = [held_tensors(weights, train, rank, full) for rank in range(train.ranks)]
    for rank in rng.sample(range(engine.ranks), min(3, engine.ranks)):
        got: dict[str, list[tuple[Box, Array]]] = {}
        for t in plan.transfers(dst=rank):
            got.setdefault(t.dst_tensor, []).append((t.dst_box, held[t.src][t.src_tensor][slices(t.src_box)]))
        tensors = {name: assembled(parts) for name, parts in got.items()}
        check_engine_rank(spec, engine, rank, full, tensors)
        assert plan.wanted[rank] == sum(
            a.size * (4 if n.endswith("e_score_correction_bias") else 2) for n, a in tensors.items()
        )


def assembled(parts: list[tuple[Box, Array]]) -> Array:
    """The tensor that the parts make: all of it, nothing twice."""
    shape = [max(box[d][1] for box, _ in parts) for d in range(len(parts[0][0]))]
    out = np.full(shape, -1)
    for box, data in parts:
        target = out[slices(box)]
        assert (target == -1).all()
        target[...] = data.reshape(target.shape)
    assert (out >= 0).all()
    return out


def check_engine_rank(spec, engine: ParallelLayout, rank: int, full: dict[str, Array], got: dict[str, Array]) -> None:  # type: ignore[no-untyped-def]
    inner = rank % engine.engine_ranks
    t, rest = inner % engine.tp, inner // engine.tp
    stage, dp = rest % engine.pp, rest // engine.pp
    sizes = [spec.layers // engine.pp + (i < spec.layers % engine.pp) for i in range(engine.pp)]
    layers = list(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))
    owner = dp * engine.tp + t
    experts = [list(map(int, part)) for part in np.array_split(range(spec.experts), engine.ep)]
    mine = experts[owner] if engine.ep > 1 else list(range(spec.experts))
    reference = EngineRank(spec, full, engine.tp, t, mine, cut_experts=engine.ep == 1)
    for name, tensor in (item for layer in layers for item in reference.layer(layer).items()):
        assert (got[name] == tensor).all(), name
    # Whole and vocabulary tensors, and nothing else.
    first, last = stage == 0, stage == engine.pp - 1
    ends = {"model.embed_tokens.weight": first or (last and spec.tied), "model.norm.weight": last,
            "lm_head.weight": last and not spec.tied}  # fmt: skip
    for name, here in ends.items():
        if name not in full:
            continue
        rows = full[name]
        if "norm" not in name:
            step = -(-rows.shape[0] // 64) * 64 // engine.tp
            rows = rows[t * step : (t + 1) * step]
        assert (name in got) == (here and rows.size > 0)
        assert name not in got or (got[name] == rows).all()
    norms = {f"model.layers.{layer}.input_layernorm.weight" for layer in layers}
    assert {n for n in got if n.endswith("input_layernorm.weight")} == norms


def test_tensor_parallel_groups_stay_on_a_node() -> None:
    """Where the bytes alone would tear a group apart, ``together`` keeps it, at the least cost."""
    weights = uniform_model()
    train = ParallelLayout(tp=8, layers=4)  # over two nodes of four
    engine = ParallelLayout(tp=4, replicas=2, layers=4)
    free = best_placement(weights, train, engine, NODES)
    kept = best_placement(weights, train, engine, NODES, together=4)
    assert {NODES.node(d) for d in free.rollout[:4]} == {0, 1}
    assert all(len({NODES.node(d) for d in kept.rollout[g : g + 4]}) == 1 for g in (0, 4))
    moved = {p: Plan(weights, train, engine, p).bytes_moved for p in (free, kept)}
    assert moved[free] < moved[kept]


def test_the_nearest_source_is_taken_and_equal_ones_share_the_load() -> None:
    weights = uniform_model(layers=8)
    train = ParallelLayout(dp=8)  # eight whole copies on two nodes
    engine = ParallelLayout(replicas=8)
    place = Placement(NODES, tuple(range(8)), tuple(range(4, 12)))  # four on shared devices, four on a third node
    plan = Plan(weights, train, engine, place)
    size = sum(w.nbytes for w in weights)
    assert [int(plan.traffic.received["device"][r]) for r in range(8)] == [size] * 4 + [0] * 4
    assert plan.traffic.sent["node"].sum() == 0
    sent = plan.traffic.sent["network"]
    assert sent.sum() == 4 * size
    assert sent.max() <= 1.1 * sent.mean()
    assert plan.traffic.card_sent.max() <= 1.1 * plan.traffic.card_sent[:4].mean()
    one_node = Plan(weights, train, engine, Placement(NODES, tuple(range(8)), (0, 1, 2, 3, 8, 9, 10, 11)))
    assert one_node.bytes_moved == plan.bytes_moved


def test_a_part_that_nobody_holds_is_named() -> None:
    weight = Weight("w", (4, 4), "BF16")
    train = TableLayout(1, {"w": [Share(((0, 2), (0, 4)), (0,))]})
    rollout = TableLayout(1, {"w": [Share(((0, 4), (0, 4)), (0,))]})
    with pytest.raises(UsageError, match="8 elements of w are wanted by rollout rank 0 and held by no trainer rank"):
        Plan([weight], train, rollout, Placement.separate(NODES, 1, 1))
    with pytest.raises(UsageError, match="the trainer layout has 1 ranks, the placement 2"):
        Plan([weight], train, rollout, Placement.separate(NODES, 2, 1))


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(FindingsError, match="2 faults") as caught:
        ParallelLayout(tp=3, dp=4, shard=3, ep=5)
    assert "shard 3 does not divide dp 4" in str(caught.value)
    assert "ep 5 x etp 1 does not divide tp 3 x dp 4" in str(caught.value)
    with pytest.raises(FindingsError, match="pp needs the number of layers"):
        ParallelLayout(pp=2)
    weights = model_weights(preset("qwen2.5-0.5b"))
    with pytest.raises(UsageError, match="tensor parallelism 4 does not divide the 14 parts"):
        Plan(weights, ParallelLayout(), ParallelLayout.vllm(tp=4), Placement.separate(NODES, 1, 4))
    with pytest.raises(UsageError, match="two ranks of one side"):
        Placement(NODES, (0, 0), (1,))


def test_uneven_fsdp_shards_and_pipeline_stages() -> None:
    layout = ParallelLayout.fsdp(4)
    shares = layout.shares(Weight("w", (9, 2), "BF16"))
    assert [(s.box[0], s.ranks) for s in shares] == [((0, 3), (0,)), ((3, 6), (1,)), ((6, 9), (2,))]  # rank 3: empty
    stages = ParallelLayout(pp=4, layers=10)
    first = [stages.shares(Weight("w", (2,), "BF16", layer=i))[0].ranks for i in range(10)]
    assert first == [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 2 + [(3,)] * 2
    given = ParallelLayout(pp=2, layers=10, stages=(2, 8))
    assert given.shares(Weight("w", (2,), "BF16", layer=2))[0].ranks == (1,)


def test_a_trillion_parameters_on_384_ranks() -> None:
    begin = time.process_time()
    weights = model_weights(preset("kimi-k2"))
    train = ParallelLayout.megatron(tp=4, pp=8, dp=8, ep=32, layers=61)
    engine = ParallelLayout.vllm(tp=8, dp=4, ep=True, replicas=4)
    plan = Plan(weights, train, engine, Placement.separate(Cluster(8, 8), 256, 128))
    assert time.process_time() - begin < 10
    assert plan.bytes_moved == plan.wanted.sum()
    assert plan.traffic.card_received.max() <= 1.001 * plan.traffic.card_received[32 * 8 :].mean()


def test_a_vision_tower_stays_whole_and_the_language_model_is_cut() -> None:
    vision = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 8,
        "patch_size": 2, "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2,
    }  # fmt: skip
    spec = ModelSpec.from_config({
        "model_type": "qwen2_5_vl", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 64, "torch_dtype": "bfloat16",
        "vision_config": vision,
    })  # fmt: skip
    weights = model_weights(spec)
    engine = ParallelLayout.vllm(tp=2, pp=2, layers=2)
    plan = Plan(weights, ParallelLayout.fsdp(2), engine, Placement.separate(NODES, 2, 4))
    for weight in weights:
        shares = engine.shares(weight)
        if "visual." in weight.name:
            assert [s.ranks for s in shares] == [(0, 1)]
            assert weight.fused is None
        elif ".embed_tokens." in weight.name:
            assert [s.ranks for s in shares] == [(0,), (1,)]
        elif "lm_head" in weight.name:
            assert [s.ranks for s in shares] == [(2,), (3,)]
    assert any("visual." in w.name for w in weights)
    assert plan.bytes_moved == plan.wanted.sum()


def test_boxes() -> None:
    assert volume(()) == 1
    assert intersect(((0, 4), (2, 5)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 5),)) is None
    assert is_flat(((1, 2), (3, 5), (0, 7)), (4, 9, 7))
    assert not is_flat(((1, 3), (3, 5), (0, 7)), (4, 9, 7))
    cells = disjoint_cells([((0, 4),), ((2, 6),), ((2, 6),), ((3, 3),)])
    assert cells == [(((0, 2),), (0,)), (((2, 4),), (0, 1, 2)), (((4, 6),), (1, 2))]


def test_planning_loads_no_torch() -> None:
    code = "import sys, rlctl.sync.plan, rlctl.sync.layout; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
