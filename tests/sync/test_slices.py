"""Deliveries in slices: random layouts, and what is refused on arrival."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import CorruptedError, MismatchError
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.protocols import LoadReport
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.slicing import Layouts
from rlctl.sync.traits import BACKEND_TRAITS
from tests.sync.sliced_models import (
    Tensors,
    blank_shards,
    engine_shards,
    layouts_of,
    random_config,
    trainer_shards,
    whole_model,
)
from tests.sync.test_gloo import Side, side, together
from tests.sync.wire_cases import assert_same

Streams = dict[int, list[tuple[str, torch.Tensor]]]

CONFIG: dict[str, Any] = random_config(random.Random(3)) | {"num_key_value_heads": 1, "vocab_size": 67}


def random_train(rng: random.Random, config: dict[str, Any]) -> ParallelLayout:
    even = config["num_key_value_heads"] > 1 and config["vocab_size"] % 2 == 0
    choices = [ParallelLayout.fsdp(1), ParallelLayout.fsdp(3), ParallelLayout.fsdp(2, replicate=2)]
    return rng.choice([*choices, *([ParallelLayout(tp=2), ParallelLayout.fsdp(2, tp=2)] if even else [])])


def received(engines: Side, streams: list[Streams], targets: list[Tensors], version: int = 1) -> list[LoadReport]:
    """What all receivers say, once all have sent. What one refuses comes before what senders see of its leaving."""
    return together(
        *(lambda e=e, t=t: e.receive_into(version, t) for e, t in zip(engines.rollouts, targets, strict=True)),
        *(lambda e=e, s=s: e.send_slices(s, version) for e, s in zip(engines.trainers, streams, strict=True)),
    )[: len(targets)]


@pytest.mark.parametrize("seed", range(8))
def test_random_layouts(seed: int) -> None:
    rng = random.Random(seed)
    config, tp, replicas = random_config(rng), rng.choice([1, 2, 4]), rng.choice([1, 2])
    layouts = layouts_of(config, random_train(rng, config), tp)
    verify, bucket = rng.choice(["full", "sampled", "off"]), rng.choice([256, 4096, 1 << 20])
    full = whole_model(layouts, seed)
    shards = [blank_shards(config, full, tp, rank % tp) for rank in range(tp * replicas)]
    ranks = layouts.train.ranks
    with side(ranks, tp * replicas, layouts=layouts, verify=verify, bucket_size=bucket, timeout=30.0) as engines:
        for version in range(2):
            engines.meet()
            streams = [layouts.sources(rank, trainer_shards(layouts, full, rank)) for rank in range(ranks)]
            targets = [layouts.targets(rank % tp, held) for rank, held in enumerate(shards)]
            reports = received(engines, streams, targets, version)
            assert all(report.complete for report in reports)
            for engine in engines.all:
                engine.finalize()
        for rank, held in enumerate(shards):
            due = engine_shards(config, full, tp, rank % tp)
            assert_same({name: due[name] for name in held}, held)
        put = sum(engine.stats.bytes_moved for engine in engines.trainers)
        slices = sum(engine.stats.tensors for engine in engines.trainers)
        assert 0 <= put - layouts.plan.bytes_moved < 256 * slices  # a bucket's alignment


@contextmanager
def two_ranks() -> Iterator[tuple[Side, list[Streams], list[Tensors]]]:
    layouts = layouts_of(CONFIG, ParallelLayout.fsdp(2), 2)
    full = whole_model(layouts, 0)
    with side(2, 2, layouts=layouts) as engines:
        engines.meet()
        streams = [layouts.sources(rank, trainer_shards(layouts, full, rank)) for rank in range(2)]
        yield engines, streams, [layouts.targets(p, blank_shards(CONFIG, full, 2, p)) for p in range(2)]


def test_a_slice_that_is_missing_or_cut_otherwise_is_named() -> None:
    with two_ranks() as (engines, streams, targets):
        gone, _ = streams[1][0].pop(3)
        name, tensor = streams[0][1][2]
        low, high = (int(x) for x in name.partition("[")[2].split(",")[0].rstrip("]").split(":"))
        wider = name.replace(f"[{low}:{high}", f"[{low}:{high + 1}")
        streams[0][1][2] = (wider, torch.cat([tensor, tensor[:1]]))
        first, second = received(engines, streams, targets)
    assert (first.unknown, first.untouched) == ([], [gone])
    assert (second.unknown, second.untouched) == ([wider], [name])


def test_a_slice_that_comes_twice_is_refused() -> None:
    with two_ranks() as (engines, streams, targets):
        name, tensor = streams[0][0][0]
        streams[1][0].append((name, tensor))
        with pytest.raises(CorruptedError, match=r"\[.*\] arrived twice"):
            received(engines, streams, targets)


def test_shards_that_are_not_those_of_the_layout_are_refused() -> None:
    layouts = layouts_of(CONFIG, ParallelLayout.fsdp(2), 2)
    full = whole_model(layouts, 0)
    shards, held = trainer_shards(layouts, full, 0), blank_shards(CONFIG, full, 2, 0)
    name, local = next(iter(shards)), next(n for n in held if "o_proj" in n)
    for odd in (shards[name][1:], shards[name].float()):
        with pytest.raises(MismatchError, match=f"trainer rank 0 holds {name}"):
            layouts.sources(0, {**shards, name: odd})
    with pytest.raises(MismatchError, match=f"has no {name}"):
        layouts.sources(0, {n: t for n, t in shards.items() if n != name})
    for odd in (held[local][:-1], torch.cat([held[local], held[local]])):
        with pytest.raises(MismatchError, match=local):
            layouts.targets(0, {**held, local: odd})
    assert "own" in layouts.targets(0, {**held, "own": torch.zeros(3)})


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    layouts = layouts_of(CONFIG, ParallelLayout.fsdp(2), 2)
    with pytest.raises(UsageError, match="slices go to each rank apart"):
        EngineOptions(layouts=layouts, delta=True)
    with pytest.raises(UsageError, match="rank 2 of a replica of 2 ranks"):
        CHECKPOINT_ENGINES.load("gloo")(Member("rollout", 0, 1, 2), EngineOptions(layouts=layouts))
    with pytest.raises(UsageError, match="1 trainer ranks take part, and the layout has 2"):
        CHECKPOINT_ENGINES.load("gloo")(Member("trainer", 0, 1), EngineOptions(layouts=layouts)).prepare()
    with pytest.raises(UsageError, match="2 replicas"):
        Layouts(layouts.weights, layouts.train, ParallelLayout.vllm(tp=2, replicas=2))


@pytest.mark.parametrize("backend", CHECKPOINT_ENGINES.names())
def test_what_a_backend_delivers_is_known_before_it_is_loaded(backend: str) -> None:
    engine = CHECKPOINT_ENGINES.load(backend)
    assert engine.delivers == BACKEND_TRAITS[backend].delivery
    if engine.delivers == "whole":
        with pytest.raises(UsageError, match=f"backend {backend} delivers whole tensors.*") as refused:
            engine(Member("rollout", 0, 1), EngineOptions(layouts=layouts_of(CONFIG, ParallelLayout.fsdp(1), 2)))
        assert "gloo" in (refused.value.fix or "")
