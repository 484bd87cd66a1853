"""Routing: where requests go, held to a model of what was leased."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from rlctl.experience.segments import RequestKey
from rlctl.rollout.balancer import Balancer, Lease

NAMES = st.sampled_from("abcd")
KEYS = st.builds(RequestKey, st.integers(-3, 5), st.integers(0, 3), st.integers(0, 2))


class Leasing(RuleBasedStateMachine):
    """Replicas come, leave and are lost while requests are leased and released, late and twice too."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.balancer = Balancer()
        self.here: dict[str, int] = {}
        self.out: dict[Lease, int] = {}  # leases that count -> the number of its conversation's lease
        self.at: dict[tuple[int, int], Lease] = {}

    @precondition(lambda self: len(self.here) < 4)
    @rule(name=NAMES)
    def add(self, name: str) -> None:
        if name not in self.here:
            epoch = self.balancer.add(name)
            assert epoch not in self.here.values()
            self.here[name] = epoch

    @precondition(lambda self: self.here)
    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.here:
            self.balancer.remove(name)
            del self.here[name]

    @rule(name=NAMES)
    def lost(self, name: str) -> None:
        self.balancer.lost(name)
        self.here.pop(name, None)
        self.out = {lease: n for lease, n in self.out.items() if lease.replica != name}

    @rule(target=leases, key=KEYS, among=st.none() | st.sets(NAMES))
    def acquire(self, key: RequestKey, among: set[str] | None) -> object:
        choice = set(self.here) if among is None else set(self.here) & among
        loads = {name: self.balancer.in_flight(name) for name in choice}
        breaks = self.balancer.breaks
        lease = self.balancer.acquire(key, among)
        if lease is None:
            assert not choice
            return multiple()
        assert lease.replica in choice
        assert lease.epoch == self.here[lease.replica]
        before = self.at.get(key[:2])
        if before is not None and before.replica in choice and self.here[before.replica] == before.epoch:
            assert lease.replica == before.replica
            assert self.balancer.breaks == breaks
        else:
            assert loads[lease.replica] == min(loads.values())
            assert self.balancer.breaks == breaks + (before is not None)
        self.at[key[:2]] = lease
        self.out[lease] = lease.number
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        assert self.balancer.release(lease) == (lease in self.out)
        self.out.pop(lease, None)

    @rule()
    def forget(self) -> None:
        self.balancer.forget()
        self.at.clear()

    @invariant()
    def what_is_in_flight_is_what_was_leased_and_not_released(self) -> None:
        counts = Counter(lease.replica for lease in self.out)
        for name in "abcd":
            assert self.balancer.in_flight(name) == counts[name]
        assert self.balancer.names == sorted(self.here)


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 5), st.integers(1, 60))
@settings(deadline=None)
def test_equal_requests_spread_evenly(replicas: int, count: int) -> None:
    balancer = Balancer()
    for index in range(replicas):
        balancer.add(str(index))
    for ordinal in range(count):
        balancer.acquire(RequestKey(ordinal, 0))
    loads = [balancer.in_flight(str(index)) for index in range(replicas)]
    assert max(loads) - min(loads) <= 1, loads


def test_requests_that_come_one_after_another_go_round() -> None:
    balancer = Balancer()
    for name in "abc":
        balancer.add(name)
    taken: Counter[str] = Counter()
    for ordinal in range(30):
        lease = balancer.acquire(RequestKey(ordinal, 0))
        assert lease is not None
        balancer.release(lease)
        taken[lease.replica] += 1
    assert set(taken.values()) == {10}, taken


def test_a_lease_of_an_earlier_stay_changes_nothing() -> None:
    balancer = Balancer()
    balancer.add("a")
    early = balancer.acquire(RequestKey(0, 0))
    assert early is not None
    balancer.lost("a")
    balancer.add("a")
    assert balancer.in_flight("a") == 0
    now = balancer.acquire(RequestKey(0, 0))
    assert now is not None and now.epoch != early.epoch
    assert not balancer.release(early)
    assert balancer.in_flight("a") == 1
    assert balancer.release(now) and not balancer.release(now)
    assert balancer.in_flight("a") == 0


def test_only_so_many_conversations_are_remembered() -> None:
    balancer = Balancer(remembered=2)
    for name in "ab":
        balancer.add(name)
    where = {}
    for ordinal in range(3):
        lease = balancer.acquire(RequestKey(ordinal, 0))
        assert lease is not None
        where[ordinal] = lease.replica
        balancer.release(lease)
    again = [balancer.acquire(RequestKey(ordinal, 0, 1)) for ordinal in (2, 1)]
    assert [lease and lease.replica for lease in again] == [where[2], where[1]]
    assert balancer.breaks == 0


@given(st.sets(st.text("abcdef0", min_size=1, max_size=4), min_size=2, max_size=6), st.integers(0, 10**6))
@settings(deadline=None)
def test_hashed_routes_depend_on_names_and_conversation_alone(names: set[str], first: int) -> None:
    keys = [RequestKey(first + index // 4, index % 4, index % 3) for index in range(40)]

    def routes(order: list[str], among: set[str] | None = None) -> dict[RequestKey, str]:
        balancer = Balancer(deterministic=True)
        for name in order:
            balancer.add(name)
        leases = {key: balancer.acquire(key, among) for key in keys}
        return {key: lease.replica for key, lease in leases.items() if lease is not None}

    every = routes(sorted(names))
    assert every == routes(sorted(names, reverse=True))
    gone = min(names)
    rest = routes(sorted(names), names - {gone})
    assert rest == routes(sorted(names - {gone}))
    assert all(rest[key] == every[key] for key in keys if every[key] != gone)  # the others stay where they are
    for key in keys:
        assert every[key] == every.get(key._replace(turn=0), every[key])


def test_hashed_routes_use_every_replica() -> None:
    balancer = Balancer(deterministic=True)
    for name in "abcd":
        balancer.add(name)
    counts: Counter[str] = Counter()
    for ordinal in range(400):
        lease = balancer.acquire(RequestKey(ordinal, 0))
        assert lease is not None
        counts[lease.replica] += 1
    assert all(60 <= counts[name] <= 140 for name in "abcd"), counts
