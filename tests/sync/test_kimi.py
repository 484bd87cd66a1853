"""What is kimi's own: 1/N staged by each owner, three stages at once, late joiners served out of host memory."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

from rlctl.sync.backends.collective import HEAD_NBYTES
from rlctl.sync.backends.gloo_group import GlooGroup
from rlctl.sync.backends.kimi import BROADCAST, COPY, RELOAD, KimiEngine
from rlctl.sync.calls import call
from rlctl.sync.cutting import Cutter
from rlctl.sync.deadline import Deadline
from rlctl.sync.delta import DeltaEncoder
from rlctl.sync.engine import Member
from rlctl.sync.errors import MemberLostError, PeerLostError, WrongBaseError
from rlctl.sync.states import Ending
from rlctl.sync.tensor_meta import TensorMeta
from tests.sync.drills import recover
from tests.sync.kimi_side import BUCKET, Side, at, together
from tests.sync.squad import Managed, Pool, Served, Squad, described_all
from tests.sync.wire_cases import assert_same, bits, blank, hard_tensors
from tests.waiting import until


def test_three_stages_run_at_once() -> None:
    """Each bucket is held at its reload until the next has arrived and the one after that was copied: a pipeline that
    does one thing at a time never gets there."""
    source = {f"layer.{i}": torch.randint(0, 256, (BUCKET,), dtype=torch.uint8) for i in range(12)}
    with Side(1, 1) as side:
        (trainer,), (worker,) = side.trainers, side.rollouts
        side.meet()
        sending = call(lambda: trainer.send_weights(source.items(), 1), "sender")
        for number, (name, tensor) in enumerate(worker.receive_weights(1)):
            assert bits(tensor) == bits(source[name])
            until(lambda n=number: min(n + 1, 11) in at(worker, BROADCAST), f"bucket {number + 1} to arrive")
            until(lambda n=number: min(n + 2, 11) in at(trainer, COPY), f"bucket {number + 2} to be copied")
        sending.result(5)
        copies, arrivals, reloads = at(trainer, COPY), at(worker, BROADCAST), at(worker, RELOAD)
        assert list(copies) == list(arrivals) == list(reloads) == list(range(12))
        for k in range(10):
            assert arrivals[k + 1].end <= reloads[k].end
            assert copies[k + 2].end <= reloads[k].end
        # Two buffers a side: no more than that is ahead.
        sent = at(trainer, BROADCAST)
        for k in range(10):
            assert copies[k + 2].begin >= sent[k].end
            assert arrivals[k + 2].begin >= reloads[k].end


def test_the_trainer_may_change_its_weights_once_they_are_staged() -> None:
    source, sent = hard_tensors(0, 1), hard_tensors(0, 1)
    with Side(2, 1) as side:
        side.meet()
        sending = [call(lambda e=e: e.send_weights(source.items(), 1), "sender") for e in side.trainers]
        for engine in side.trainers:
            assert engine.staged.wait(10)
        assert not any(future.done() for future in sending)  # nobody has taken anything yet
        for name, tensor in source.items():
            if name != "expanded":
                tensor.detach().zero_()
        target = blank(0)
        side.rollouts[0].receive_into(1, target)
        for future in sending:
            future.result(5)
        assert_same(sent, target)


def test_the_bytes_that_cross_the_groups_are_each_owners_part(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: Counter[str] = Counter()
    inner = GlooGroup.broadcast

    def counted(group: GlooGroup, tensor: torch.Tensor, deadline: Deadline, what: str) -> Any:
        if what.startswith("sending"):
            crossed[threading.current_thread().name] += tensor.numel()
        return inner(group, tensor, deadline, what)

    monkeypatch.setattr(GlooGroup, "broadcast", counted)
    source = hard_tensors(0, 1)
    with Side(2, 2, verify="off") as side:
        side.meet()
        targets = [blank(0), blank(0)]
        sending = [call(lambda e=e: e.send_weights(source.items(), 1), f"owner {e.member.rank}") for e in side.trainers]
        together(*(lambda e=e, t=t: e.receive_into(1, t) for e, t in zip(side.rollouts, targets, strict=True)))
        moved = [future.result(5).bytes_moved for future in sending]
    cutter = Cutter(BUCKET, fill=True)
    ends = Counter[int]()
    for name, tensor in source.items():
        for bucket, chunk in cutter.place(TensorMeta.of(name, tensor)):
            ends[bucket] = chunk.offset + chunk.nbytes
    for owner in range(2):
        parts = [used for bucket, used in ends.items() if bucket % 2 == owner]
        assert moved[owner] == sum(parts)
        assert crossed[f"rlctl-owner {owner}"] == moved[owner] + HEAD_NBYTES * len(parts)  # a description a bucket
    for target in targets:
        assert_same(source, target)


@pytest.mark.parametrize("trainers", [1, 3])
def test_memory_is_a_part_of_the_model_and_three_buckets(trainers: int) -> None:
    rng = random.Random(5)
    source = {f"layer.{i}": torch.zeros(rng.randrange(1, 70_000), dtype=torch.uint8) for i in range(40)}
    model = sum(-(-t.nbytes // 256) * 256 for t in source.values())
    with Side(trainers, 1) as side:
        side.meet()
        stats = together(
            *(lambda e=e: e.send_weights(source.items(), 1) for e in side.trainers),
            lambda: side.rollouts[0].receive_into(1, {n: t.clone() for n, t in source.items()}),
        )[:trainers]
        moved = [s.bytes_moved for s in stats]
        assert max(moved) - min(moved) <= BUCKET
        assert max(s.extra_nbytes for s in stats) <= model / trainers + 3 * BUCKET
        assert side.rollouts[0].extra_nbytes == 2 * BUCKET


def test_a_version_is_sent_again_out_of_host_memory() -> None:
    with Side(2, 2) as side:
        side.meet()
        source = hard_tensors(0, 1)
        targets = [blank(0), blank(0)]
        together(
            *(lambda e=e: e.send_weights(source.items(), 1, base_version=0) for e in side.trainers),
            *(
                lambda e=e, t=t: e.receive_into(1, t, base_version=0)
                for e, t in zip(side.rollouts, targets, strict=True)
            ),
        )
        for engine in [*side.trainers, *side.rollouts]:
            engine.finalize()
        late = KimiEngine(Member("rollout", 0, 1), side.trainers[0].options)
        taking_part = side.meet([late])
        target = blank(0)
        with pytest.raises(WrongBaseError, match="trainer 0: version 2 is not in host memory any more"):
            side.trainers[0].resend_weights(2)
        together(*(lambda e=e: e.resend_weights(1) for e in side.trainers), lambda: late.receive_into(1, target))
        for engine in taking_part:
            engine.finalize()
        late.close()
        assert_same(hard_tensors(0, 1), target)
        side.meet()  # and the others can be met again


def test_a_version_that_went_as_changes_is_sent_again_whole() -> None:
    with Side(2, 1, delta=True) as side:
        source = {f"layer.{i}": torch.randn(3000, dtype=torch.bfloat16) for i in range(7)}
        for version, base in ((1, None), (2, 1)):
            side.meet()
            names = list[str]()
            for tensor in source.values():
                tensor[:20] += 1

            def receive(names: list[str] = names, version: int = version, base: int | None = base) -> None:
                names += [name for name, _ in side.rollouts[0].receive_weights(version, base_version=base)]

            together(
                *(
                    lambda e=e, v=version, b=base: e.send_weights(source.items(), v, base_version=b)
                    for e in side.trainers
                ),
                receive,
            )
            for engine in [*side.trainers, *side.rollouts]:
                engine.settle(version)
                engine.finalize()
        assert sorted(names) == [f"layer.{i}#delta" for i in range(7)]
        sent = {name: tensor.clone() for name, tensor in source.items()}
        for tensor in source.values():
            tensor.zero_()
        target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        side.meet()
        together(
            *(lambda e=e: e.resend_weights(2) for e in side.trainers),
            lambda: side.rollouts[0].receive_into(2, target),
        )
        assert_same(sent, target)
        side.trainers[0].encoder = DeltaEncoder()  # as if the sync had not been committed everywhere
        side.trainers[0]._changes = True
        with pytest.raises(WrongBaseError, match="only what changed in version 2"):
            side.trainers[0].resend_weights(2)


def test_a_cancelled_staging_ends_at_its_next_tensor() -> None:
    with Side(1, 1) as side:
        side.meet()
        taken = itertools.count()

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for i in taken:
                yield f"layer.{i}", torch.zeros(10)
                if i == 3:
                    side.trainers[0].cancel()

        with pytest.raises(Exception, match=r"given up at tensor layer\.4"):
            side.trainers[0].send_weights(stream(), 1)
        assert not side.trainers[0].staged.is_set()
        with pytest.raises(PeerLostError):
            side.rollouts[0].receive_into(1, {})


def test_a_late_joiner_gets_whole_tensors_where_the_others_got_changes(pool: Pool) -> None:
    managed = Managed(Squad(pool, "kimi", 2, 2, delta=True), delta=True)
    managed.load_version(1)
    first, second = managed.sync(1), managed.sync(2)
    assert second.bytes < first.bytes / 3
    managed.manager.lost("rollout 1", "it was restarted")
    managed.load_version(9)
    assert managed.manager.catch_up()["rollout 1"].committed == ["rollout 1"]
    assert managed.squad.digests() == 2 * [described_all(0, 1)]
    third = managed.sync(3)
    assert third.attempts == 1
    assert managed.squad.digests() == 2 * [described_all(0, 9)]


class Counted(Managed):
    """A managed squad that counts what each rollout member is asked."""

    def __init__(self, pool: Pool, rollouts: int, **policy: Any) -> None:
        super().__init__(Squad(pool, "kimi", 2, rollouts), **policy)
        self.asked: dict[str, list[str]] = {}
        inner = self.squad.rollouts.start

        def start(command: str, arguments: Any, deadline: Deadline) -> Any:
            for place in arguments:
                self.asked.setdefault(self.squad.rollouts.members[place].name, []).append(command)
            return inner(command, arguments, deadline)

        self.squad.rollouts.start = start  # type: ignore[method-assign]


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_a_late_joiner_is_served_while_live_replicas_are_not_touched(pool: Pool, commit: str) -> None:
    managed = Counted(pool, 2, commit=commit)
    late = managed.squad.rollouts.members.pop()
    managed.served.pop()
    managed.manager.remove(late.replica)
    assert managed.manager.catch_up() == {}  # nothing was sent yet
    recover(managed, 1)

    managed.load_version(7)  # the trainer trains on
    managed.squad.rollouts.members.append(late)
    managed.served.append(Served(late))
    managed.manager.add(managed.served[-1])
    live = managed.served[0]
    managed.asked.clear()
    live.calls.clear()
    reports = managed.manager.catch_up()
    assert list(reports) == [late.replica]
    assert reports[late.replica].ending is Ending.COMMITTED
    assert managed.asked == {
        late.name: ["prepare", "init_process_group", "receive", "commit", "finalize"],
    }
    assert live.calls == []
    assert managed.manager.versions == {live.replica: 1, late.replica: 1}
    managed.assert_whole()
    assert managed.manager.catch_up() == {}  # nobody is left
    recover(managed, 8)


def test_a_restarted_replica_is_filled_again_unless_its_owners_lost_it(pool: Pool) -> None:
    managed = Counted(pool, 2)
    recover(managed, 1)
    for member in (managed.squad.rollouts.members[1], managed.squad.trainers.members[1]):
        os.kill(member.pid, signal.SIGKILL)
        until(lambda p=member.pid: psutil.Process(p).status() == psutil.STATUS_ZOMBIE, "the end of a process")
        managed.manager.lost("rollout 1", "it was restarted")
        with suppress(MemberLostError):  # unless it was noticed already
            member.ask("served", {}, Deadline(10))
        managed.wait_for_processes()
        if member.name == "rollout 1":
            assert managed.manager.catch_up()["rollout 1"].committed == ["rollout 1"]
            managed.assert_whole()
    managed.manager.lost("rollout 1", "it was restarted")
    report = managed.manager.catch_up()["rollout 1"]
    assert report.ending is Ending.FENCED
    assert "trainer 1: version 1 is not in host memory any more" in report.fenced["rollout 1"]
    assert managed.manager.versions == {"rollout 0": 1, "rollout 1": None}
    recover(managed, 2)


def test_an_engine_that_keeps_nothing_leaves_late_joiners_to_the_next_sync(pool: Pool) -> None:
    managed = Managed(Squad(pool, "gloo", 1, 1))
    recover(managed, 1)
    managed.manager.lost("rollout 0", "it was restarted")
    assert managed.manager.catch_up() == {}
    with pytest.raises(WrongBaseError, match="backend gloo keeps no version"):
        managed.squad.trainers.members[0].ask("resend", {"version": 1}, Deadline(10))
    recover(managed, 2)
