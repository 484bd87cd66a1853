"""The checkpoint engine ``reshard``: every device ends with its exact part, and only what it lacked moved."""

from __future__ import annotations

import random

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.hybrid.checkpoint_engine import ReshardEngine
from rlctl.hybrid.device_plan import device_plan, embedded_layout, trainer_layout
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import MismatchError, WrongBaseError
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.slicing import Layouts
from rlctl.sync.traits import BACKEND_TRAITS
from tests.hybrid.world import World
from tests.sync.sliced_models import random_config, trainer_shards, whole_model

AT = "tests.hybrid.switching_on_ranks:"


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 20)
    print("seed", value)
    return value


def alone(seed: int, dtype: str = "F32", **options: object) -> ReshardEngine:
    spec = ModelSpec.from_config(random_config(random.Random(seed)))
    layouts = Layouts.of_model(spec, trainer_layout(1, 1), embedded_layout(1, 1), dtype=dtype)
    return ReshardEngine(Member("trainer", 0, 1), EngineOptions(layouts=layouts, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "train_tp", "dtype"), [(1, 1, "F32"), (2, 1, "BF16"), (4, 1, "F32"), (2, 2, "BF16")])
def test_each_device_gets_its_part_and_nothing_else_moves(ranks: World, seed, tp, train_tp, dtype):
    found = ranks.call(AT + "becomes", seed=seed, tp=tp, train_tp=train_tp, dtype=dtype)
    for version in (0, 1):
        sent = sum(rank["said"][version][0] for rank in found)
        received = sum(rank["said"][version][1] for rank in found)
        assert sent == received == found[0]["planned"] > 0
    assert all(len(rank["digest"]) == 32 for rank in found)
    assert not any(rank["kept"] for rank in found)


@pytest.mark.parametrize("tp", [2, 4])
def test_what_does_not_divide_is_padded_and_zeros_do_not_travel(ranks: World, seed, tp):
    found = ranks.call(AT + "becomes", seed=seed, tp=tp, train_tp=1, dtype="BF16", pad=True)
    for version in (0, 1):
        assert sum(rank["said"][version][0] for rank in found) == found[0]["planned"] > 0


@pytest.mark.parametrize(
    ("tp", "train_tp", "dtype", "pad"), [(2, 1, "BF16", False), (2, 2, "F32", False), (4, 1, "F32", True)]
)
def test_with_deltas_each_device_keeps_what_was_predicted(ranks: World, seed, tp, train_tp, dtype, pad):
    found = ranks.call(AT + "becomes", seed=seed, tp=tp, train_tp=train_tp, dtype=dtype, delta=True, pad=pad)
    moved = [sum(rank["said"][version][0] for rank in found) for version in (0, 1)]
    assert 0 < moved[1] <= moved[0] == found[0]["planned"]
    assert all(rank["kept"] == rank["due"] > 0 for rank in found)


def test_a_flipped_bit_is_found_and_named(ranks: World, seed):
    said = ranks.call(AT + "flipped", seed=seed, tp=2, who=seed % 4)
    assert [bool(message) for message in said] == [rank == seed % 4 for rank in range(4)]
    assert "of version 1 lies otherwise than rank" in said[seed % 4]


def test_one_device_moves_nothing(seed):
    engine = alone(seed)
    assert engine.layouts is not None
    full = whole_model(engine.layouts, seed)
    for version in (0, 1):
        engine.prepare()
        engine.init_process_group()
        held = {name: shard.clone() for name, shard in trainer_shards(engine.layouts, full, 0).items()}
        stats = engine.send_weights(held.items(), version)
        engine.finalize()
        assert (stats.bytes_moved, engine.plan.bytes_moved) == (0, 0)
        shards = dict(engine.receive_weights(version))
        assert torch.equal(*(found["model.norm.weight"].view(torch.uint8) for found in (shards, full)))
    with pytest.raises(WrongBaseError, match="holds version 1, and 0 is asked for"):
        next(engine.receive_weights(0))
    engine.close()
    for shard in held.values():  # what was hashed leaves the device as ever
        shard.untyped_storage().resize_(0)


def test_it_is_what_its_traits_say_and_refuses_the_rest(seed):
    assert CHECKPOINT_ENGINES.load("reshard") is ReshardEngine
    traits = BACKEND_TRAITS["reshard"]
    assert (traits.layouts, traits.in_place, traits.delivery) == (("hybrid",), True, ReshardEngine.delivers)
    with pytest.raises(UsageError, match="none are declared"):
        ReshardEngine(Member("trainer", 0, 1), EngineOptions())
    layouts = alone(seed).layouts
    with pytest.raises(UsageError, match="all members are trainers"):
        ReshardEngine(Member("rollout", 0, 1), EngineOptions(layouts=layouts))
    told = alone(seed).prepare()
    assert ReshardEngine.build_topology(2, 0, [told, told]) == [{}, {}]
    with pytest.raises(MismatchError, match="trainer 1 and trainer 0 have other layouts"):
        ReshardEngine.build_topology(2, 0, [told, alone(seed, "BF16").prepare()])
    with pytest.raises(UsageError, match="has no rollout members, and there are 1"):
        ReshardEngine.build_topology(1, 1, [told, told])
    spec = ModelSpec.from_config(random_config(random.Random(seed)))
    weights = Layouts.of_model(spec, trainer_layout(1, 1), embedded_layout(1, 1)).weights
    with pytest.raises(UsageError, match="4 rollout ranks do not fit on the trainer's 2 devices"):
        device_plan(weights, trainer_layout(2, 1), embedded_layout(2, 2))
