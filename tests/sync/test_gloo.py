"""What is gloo's own: which bytes cross the group, groups kept or made anew, strangers, waits that can be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rlctl.sync.backends import gloo_group
from rlctl.sync.backends.collective import HEAD_NBYTES
from rlctl.sync.backends.gloo import GlooEngine
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.calls import call
from rlctl.sync.channel import connect
from rlctl.sync.cutting import plan_buckets
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import CorruptedError, PeerLostError
from rlctl.sync.faults import Drill, Fault
from rlctl.sync.tensor_meta import TensorMeta
from tests.sync.wire_cases import assert_same, blank, hard_tensors


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run all at once, each in its thread, and return their results."""
    return [future.result(30) for future in [call(action, "test") for action in actions]]


class Side:
    """Engines of both sides in this process."""

    def __init__(self, trainers: int, rollouts: int, **options: Any) -> None:
        given = EngineOptions(**{"bucket_size": 8192, "timeout": 10.0, "token": "gloo", **options})
        self.trainers = [GlooEngine(Member("trainer", rank, trainers), given) for rank in range(trainers)]
        parts = given.layouts.rollout.ranks if given.layouts else 1
        self.rollouts = [GlooEngine(Member("rollout", r, rollouts, r % parts), given) for r in range(rollouts)]
        self.all = [*self.trainers, *self.rollouts]

    def meet(self) -> None:
        metadata = [engine.prepare() for engine in self.all]
        kwargs = GlooEngine.build_topology(len(self.trainers), len(self.rollouts), metadata)
        together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(self.all, kwargs, strict=True)))

    def sync(self, version: int, *, at_end: Callable[[], None] = lambda: None) -> list[dict[str, torch.Tensor]]:
        self.meet()
        source = hard_tensors(0, version)
        targets = [blank(0) for _ in self.rollouts]
        together(
            *(lambda e=e: e.send_weights(source.items(), version) for e in self.trainers),
            *(lambda e=e, t=t: e.receive_into(version, t) for e, t in zip(self.rollouts, targets, strict=True)),
        )
        at_end()
        for engine in self.all:
            engine.finalize()
        return targets


@contextmanager
def side(trainers: int, rollouts: int, **options: Any) -> Iterator[Side]:
    made = Side(trainers, rollouts, **options)
    yield made
    for engine in made.all:
        engine.close()


def test_the_bytes_that_cross_the_group_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: Counter[str] = Counter()
    inner = gloo_group.GlooGroup.broadcast

    def counted(group: gloo_group.GlooGroup, tensor: torch.Tensor, deadline: Deadline, what: str) -> Any:
        if what.startswith("sending"):
            crossed["bytes"] += tensor.numel() * tensor.element_size()
            crossed["messages"] += 1
        return inner(group, tensor, deadline, what)

    monkeypatch.setattr(gloo_group.GlooGroup, "broadcast", counted)
    with side(1, 2, verify="off") as engines:
        targets = engines.sync(1)
        stats = engines.trainers[0].stats
    for target in targets:
        assert_same(hard_tensors(0, 1), target)
    plan = plan_buckets([TensorMeta.of(n, t) for n, t in hard_tensors(0, 1).items()], 8192)
    planned = sum(max(chunk.offset + chunk.nbytes for chunk in bucket) for bucket in plan)
    assert stats.bytes_moved == planned
    # A bucket's description is one message; its gaps of alignment are sent where they lie between small tensors.
    assert crossed["bytes"] == planned + HEAD_NBYTES * len(plan)
    assert crossed["messages"] == 2 * len(plan)


def test_groups_stay_while_the_members_do() -> None:
    with side(2, 2, senders=2) as engines:
        engines.sync(1)
        first = list(engines.rollouts[0]._groups)
        assert len(first) == 2
        engines.sync(2)
        assert engines.rollouts[0]._groups == first
        engines.rollouts.pop(0).close()
        engines.rollouts[0].seat(0, 1)
        engines.all = [*engines.trainers, *engines.rollouts]
        (target,) = engines.sync(3)
        assert_same(hard_tensors(0, 3), target)


def test_groups_are_made_anew_when_told_so() -> None:
    with side(1, 1, extras={"keep_group": False}) as engines:
        for version in range(2):
            engines.sync(version)
            assert engines.rollouts[0]._groups == []


def test_a_stranger_is_refused_and_keeps_nobody_from_meeting() -> None:
    with side(1, 1) as engines:
        metadata = [engine.prepare() for engine in engines.all]
        kwargs = GlooEngine.build_topology(1, 1, metadata)
        sender = call(lambda: engines.trainers[0].init_process_group(**kwargs[0]), "sender")
        with pytest.raises(PeerLostError, match="refused"):
            connect(metadata[0]["address"], b"another run", "trainer 0", Deadline(5))
        engines.rollouts[0].init_process_group(**kwargs[1])
        sender.result(5)


def test_a_cancelled_wait_ends_at_once_on_both_sides() -> None:
    with side(1, 1, timeout=20.0) as engines:
        engines.meet()
        receiver = call(lambda: engines.rollouts[0].receive_into(1, {}), "receiver")
        time.sleep(0.2)
        begin = time.monotonic()
        engines.rollouts[0].cancel()
        assert isinstance(receiver.exception(5), PeerLostError)
        with pytest.raises(PeerLostError):
            engines.trainers[0].send_weights([("a", torch.zeros(1 << 22))], 1)
        assert time.monotonic() - begin < 3
        for engine in engines.all:
            engine.finalize()
        (target,) = engines.sync(2)
        assert_same(hard_tensors(0, 2), target)


def test_a_member_that_was_cancelled_when_it_was_through_meets_the_others_anew() -> None:
    """Another replica's failure ends the connections of all; those that were through do not keep theirs."""
    with side(1, 2) as engines:
        for version, member in enumerate(engines.all):
            engines.sync(2 * version, at_end=member.cancel)
            for target in engines.sync(2 * version + 1):
                assert_same(hard_tensors(0, 2 * version + 1), target)


def test_a_rank_that_fails_to_send_still_takes_its_stream_to_the_end() -> None:
    with side(2, 1) as engines:
        engines.meet()
        engines.rollouts[0].cancel()
        taken = []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for i in range(9):
                taken.append(i)
                yield f"layer.{i}", torch.zeros(5000)

        with pytest.raises(PeerLostError):
            engines.trainers[0].send_weights(stream(), 1)
        assert taken == list(range(9))


def leave_in_the_midst() -> None:
    """What a process does before it exits: groups end while peers wait, and in one something is stuck."""
    test_a_rank_that_fails_to_send_still_takes_its_stream_to_the_end()
    engines = Side(1, 1, timeout=60.0)
    engines.meet()
    group = engines.rollouts[0]._groups[0]
    group.broadcast(torch.zeros(8), Deadline(60), "nothing comes")
    gloo_group._bury(group._group, group._works)
    assert len(gloo_group._BURIED) == 1
    os.write(1, b"left")


def test_a_process_exits_at_once_and_well_with_groups_that_have_not_ended() -> None:
    code = "from tests.sync.test_gloo import leave_in_the_midst as leave; leave()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "left"), done.stderr


def large(seed: int) -> dict[str, torch.Tensor]:
    """Pieces that travel apart and pieces that do not, and some whose memory is not in order."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "a": (300, 400),
        "norm": (40,),
        "b": (1000, 700),
        "bias": (3,),
        "c": (128 << 10,),
        "transposed": (600, 500),
    }
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return {**tensors, "transposed": tensors["transposed"].t()}


@pytest.mark.parametrize("bucket", [256 << 10, 1 << 20, 64 << 20])
@pytest.mark.parametrize("bound", [True, False])
def test_large_pieces_go_from_where_they_lie_to_where_they_belong(bucket: int, bound: bool) -> None:
    source, targets = large(1), {n: torch.zeros_like(t) for n, t in large(2).items()}
    with side(1, 1, bucket_size=bucket) as engines:
        if bound:
            engines.trainers[0].bind(source)
        copied = Counter[str]()
        for version in range(2):
            for target in targets.values():
                target.zero_()
            engines.meet()
            inner = engines.trainers[0]._put

            def counted(b: FilledBucket, inner: Any = inner) -> Any:
                copied["bytes"] += b.meta.used - sum(p.numel() for p in b.placed.values())
                return inner(b)

            engines.trainers[0]._put = counted  # type: ignore[method-assign]
            together(
                lambda v=version: engines.trainers[0].send_weights(source.items(), v),
                lambda v=version: engines.rollouts[0].receive_into(v, targets),
            )
            engines.trainers[0]._put = inner  # type: ignore[method-assign]
            for engine in engines.all:
                engine.finalize()
            assert_same(source, targets)
        assert (copied["bytes"] < 2 * (source["transposed"].nbytes + (1 << 20))) == bound


def test_damage_to_a_large_piece_is_found_and_spares_the_trainers_weights() -> None:
    source, targets = large(1), {n: torch.zeros_like(t) for n, t in large(2).items()}
    with side(1, 1, bucket_size=8 << 20) as engines:
        engines.trainers[0].bind(source)
        engines.meet()
        drill = Drill(engines.trainers[0], Fault("flip"))
        drill.arm()
        receiver = call(lambda: engines.rollouts[0].receive_into(1, targets), "receiver")
        engines.trainers[0].send_weights(source.items(), 1)
        assert isinstance(receiver.exception(10), CorruptedError)
        drill.disarm()
    assert_same(large(1), source)
