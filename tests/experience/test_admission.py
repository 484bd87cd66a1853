"""Staleness stays within its bound and nothing waits for ever, whatever order groups finish in and where runs break."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest

from rlctl.experience.admission import Admission, Policy
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.segments import RequestKey, Segment

SEEDS = range(40)


@dataclass
class World:
    """A run whose groups finish in a random order. Each may have a token of any version since it was dispatched."""

    rng: random.Random
    admission: Admission
    rounds: int
    size: int
    dull: float
    buffer: GroupBuffer
    next_ordinal: int = 0
    version: int = 0
    trained: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    passed: int = 0

    def admit(self) -> None:
        taken = min(self.buffer.room(self.version), self.size - self.next_ordinal)
        for ordinal in range(self.next_ordinal, self.next_ordinal + taken):
            self.buffer.submit(PromptGroup(ordinal, ordinal, "", [1], 1, self.version))
        self.next_ordinal += taken

    def finish(self) -> bool:
        """Finish one group, or have one go on in another version. Slow ones are slow: low ordinals come late."""
        waiting = self.buffer.unfinished()
        if not waiting:
            return False
        group = waiting[min(int(self.rng.random() ** 0.5 * len(waiting)), len(waiting) - 1)]
        before = group.under_way[0].segments if group.under_way else []
        segments = [*before, Segment([1], [-0.5], self.version)]
        if self.rng.random() < 0.3:
            self.buffer.goes_on(Response(RequestKey(group.ordinal, 0), segments, "abort"))
        else:
            self.buffer.complete(Response(RequestKey(group.ordinal, 0), segments, "stop", 1.0))
            if self.rng.random() < self.dull:
                self.evicted.append(self.buffer.evict(group.ordinal).ordinal)
        return True

    def expire(self) -> None:
        self.stale += [ordinal for ordinal, _ in self.buffer.expire(self.version)]

    def take(self, count: int) -> int:
        while True:
            self.admit()
            self.expire()
            count = min(count, len(self.buffer) + self.size - self.next_ordinal)
            if self.buffer.ready(count, self.version) and (self.rng.random() < 0.3 or not self.buffer.unfinished()):
                break
            if not self.finish():
                self.admit()
                assert self.buffer.unfinished() or self.buffer.ready(
                    min(count, len(self.buffer) + self.size - self.next_ordinal), self.version
                ), "nothing is under way, and the batch is not there"
        first = min((g.ordinal for g in self.buffer.unfinished()), default=self.size)
        groups = self.buffer.select(count, self.version)
        self.trained += [group.ordinal for group in groups]
        self.ages += [self.version - group.oldest_version for group in groups]
        self.passed += sum(group.ordinal > first for group in groups)
        return count

    def step(self) -> int:
        count = sum(self.take(self.admission.batch // self.rounds) for _ in range(self.rounds))
        self.version += 1
        for _ in range(self.rng.randrange(4)):
            self.admit()
            self.finish()
        return count

    def broken_off(self) -> World:
        """What a resumed run begins with."""
        other = GroupBuffer(self.admission)
        other.load(json.loads(json.dumps(self.buffer.state())))
        other.continue_from(self.version)
        lists = {name: list(getattr(self, name)) for name in ("trained", "evicted", "stale", "ages")}
        return World(
            self.rng, self.admission, self.rounds, self.size, self.dull, other, self.next_ordinal, self.version, **lists
        )


def run(seed: int, policy: Policy, *, dull: float = 0.0, in_order: bool = False) -> World:
    rng = random.Random(seed)
    rounds = rng.choice([1, 2, 4])
    batch, bound = rounds * rng.randint(1, 4), rng.randint(0, 4)
    admission = Admission(policy, batch, bound, rng.choice([0.0, 0.5, 1.0, 2.0, 4.0, 6.0]), in_order)
    print("seed", seed, admission, "rounds", rounds)
    world = World(rng, admission, rounds, rng.randint(1, 14 * batch), dull, GroupBuffer(admission))
    saved = world.broken_off()
    while True:
        count = world.step()
        if rng.random() < 0.3:
            world = saved.broken_off()
            continue
        saved = world.broken_off()
        if not count:
            return world


@pytest.mark.parametrize("policy", ["pacing", "wait"])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dull", [0.0, 0.3])
def test_nothing_is_dropped_and_no_token_is_older_than_the_bound(policy: Policy, in_order: bool, dull: float) -> None:
    passed = 0
    for seed in SEEDS:
        world = run(seed, policy, dull=dull, in_order=in_order)
        assert max(world.ages, default=0) <= world.admission.max_staleness
        assert sorted(world.trained + world.evicted) == list(range(world.size))
        assert not world.stale
        passed += world.passed
    assert (passed > 0) == (not in_order), "fast groups never passed slow ones: the test tests nothing"


@pytest.mark.parametrize("in_order", [False, True])
def test_dropping_drops_what_is_too_old_and_nothing_else(in_order: bool) -> None:
    dropped = 0
    for seed in SEEDS:
        world = run(seed, "drop", in_order=in_order)
        assert max(world.ages, default=0) <= world.admission.max_staleness
        assert sorted(world.trained + world.stale) == list(range(world.size))
        if world.admission.warmup == 0:
            assert not world.stale
        dropped += len(world.stale)
    assert dropped


def test_what_is_due_is_waited_for_and_what_has_time_may_be_passed() -> None:
    def buffer(admission: Admission, finished: list[int]) -> GroupBuffer:
        made = GroupBuffer(admission)
        for ordinal in range(made.room(0)):
            made.submit(PromptGroup(ordinal, 0, "", [1], 1, 0))
        for ordinal in finished:
            made.complete(Response(RequestKey(ordinal, 0), [Segment([1], [-0.5], 0)], "stop", 1.0))
        return made

    # One batch ahead and a bound of 1: in version 1 all that version 0 made is due.
    tight = buffer(Admission("pacing", 2, 1, 1.0), [1, 3])
    assert [group.ordinal for group in tight.select(2, 0)] == [1, 3]
    for ordinal in range(4, 4 + tight.room(1)):
        tight.submit(PromptGroup(ordinal, 0, "", [1], 1, 1))
        tight.complete(Response(RequestKey(ordinal, 0), [Segment([1], [-0.5], 1)], "stop", 1.0))
    assert [group.ordinal for group in tight.finished()] == [4, 5]
    assert not tight.ready(1, 1)
    tight.complete(Response(RequestKey(2, 0), [Segment([1], [-0.5], 0)], "stop", 1.0))
    assert not tight.ready(2, 1)
    assert [group.ordinal for group in tight.select(1, 1)] == [2]
    # With a bound of 2 there is a batch of room to be passed.
    loose = buffer(Admission("pacing", 2, 2, 1.0), [1, 3])
    loose.select(2, 0)
    for ordinal in range(4, 4 + loose.room(1)):
        loose.submit(PromptGroup(ordinal, 0, "", [1], 1, 1))
        loose.complete(Response(RequestKey(ordinal, 0), [Segment([1], [-0.5], 1)], "stop", 1.0))
    assert [group.ordinal for group in loose.select(2, 1)] == [4, 5]
    # Those that are due now, in version 2, must all be taken.
    assert loose.ages(2) == {0: 2, 2: 2}
    assert not loose.ready(1, 2)


def test_waiting_admits_nothing_while_a_group_under_way_is_at_the_bound() -> None:
    for policy, room in (("pacing", 2), ("wait", 0)):
        buffer = GroupBuffer(Admission(policy, 2, 1, 0.0))  # type: ignore[arg-type]
        for ordinal in range(2):
            buffer.submit(PromptGroup(ordinal, 0, "", [1], 1, 0))
        assert (buffer.room(0), buffer.room(1)) == (0, room)


def test_a_run_goes_on_with_batches_of_another_size_and_with_counts_that_were_never_saved() -> None:
    for state in ({"groups": [], "selected": 80}, {"groups": []}):
        buffer = GroupBuffer(Admission("pacing", 32, 1, 1.0))
        buffer.load(state)
        buffer.continue_from(10)
        assert buffer.room(10) == 64
        assert buffer.goal(10, 1) - buffer.selected == 64


def test_nothing_is_made_that_no_step_takes() -> None:
    buffer = GroupBuffer(Admission("pacing", 4, 4, 3.0, batches=5))
    assert [buffer.room(version) for version in range(6)] == [16, 20, 20, 20, 20, 20]
    assert [buffer.goal(version, 3) for version in range(3)] == [16, 20, 20]
