"""Where a pool sent each request, decided again: replicas that die, come back, leave, and syncs, from many threads."""

import random
import threading

import pytest

from rlctl.experience.event_base import Event
from rlctl.experience.event_log import EventLog
from rlctl.experience.schedule_events import Asked, Recall, Routed, SeatChanged
from rlctl.experience.segments import RequestKey
from rlctl.replay.scheduling.expecting import DisagreementError
from rlctl.replay.scheduling.routing import Routing
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.pool import ReplicaPool
from tests.replay.scheduling.schedules import changed, numbered_anew, places, swapped, without
from tests.rollout.background import STOPS, tiny_model
from tests.rollout.thread_replicas import ThreadReplica

PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=STOPS)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def request(ordinal: int, sample: int = 0) -> Request:
    return Request(RequestKey(ordinal, sample), (1 + abs(ordinal) % 5, 2), PARAMS, 7)


def live(model, seed: int, *, lockstep: bool) -> list[Event]:
    """Have a pool live for a while, and return what it told."""
    rng, events = random.Random(seed), list[Event]()
    log = EventLog(None)
    log.subscribe(events.append)
    made = lambda name: ThreadReplica(model, name, lockstep=lockstep, max_slots=4, pause=0.0005)  # noqa: E731
    replicas = {name: made(name) for name in "abc"}
    pool = ReplicaPool(replicas.values(), deterministic=lockstep, patience=60, tell=log.emit)
    answered = []
    beside = threading.Thread(target=lambda: answered.append(pool.generate([request(-1 - n) for n in range(6)])))
    beside.start()
    try:
        for turn in range(8):
            pool.submit([request(10 * turn + n, rng.randrange(2)) for n in range(rng.randint(1, 8))])
            name = rng.choice("abc")
            what = rng.randrange(5)
            if what == 0 and not replicas[name].lost:
                replicas[name].kill()
            elif what == 1:
                pool.abort([RequestKey(10 * turn + n, 0) for n in range(4)])
            elif what == 2:
                with pool.syncing():
                    pool.step(0.0)
            elif what == 3 and replicas[name].lost:
                pool.replace(_again(replicas, name, made))
            pool.step(0.01)
        for name in "abc":
            if replicas[name].lost:
                pool.replace(_again(replicas, name, made))
        while pool.num_running or beside.is_alive():
            pool.step(0.05)
        beside.join(60)
        assert len(answered[0]) == 6
    finally:
        pool.close()
        for replica in replicas.values():
            replica.close()
    return events


def _again(replicas, name, made):
    replicas[name].close()
    replicas[name] = made(name)
    return replicas[name]


def decided_again(events: list[Event], *, lockstep: bool) -> DisagreementError | None:
    """Return the first difference, if there is one."""
    routing = Routing(deterministic=lockstep)
    try:
        for event in events:
            routing.take(event)
    except DisagreementError as error:
        return error
    return None


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_pools_life_is_decided_again_and_what_is_changed_in_it_is_named(model, lockstep):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    events: list[Event] = []
    for _ in range(3):
        events = live(model, rng.randrange(1 << 30), lockstep=lockstep)
        assert decided_again(events, lockstep=lockstep) is None
    routed = places(events, Routed)
    for place in rng.sample(routed, min(6, len(routed))):
        event = events[place]
        replicas = [*event.replicas[:-1], "b" if event.replicas[-1] != "b" else "c"]
        found = decided_again(changed(events, place, replicas=replicas), lockstep=lockstep)
        assert found is not None and found.seq == event.seq
        keys = [*event.keys[:-1], (999, 0, 0)]
        found = decided_again(changed(events, place, keys=keys), lockstep=lockstep)
        assert found is not None and found.seq == event.seq
    for kind in (Asked, Routed, SeatChanged):
        for place in [place for place in places(events, kind) if place < routed[-1]][:6]:
            if kind is SeatChanged and events[place].change not in ("joined", "serving"):
                continue
            assert decided_again(numbered_anew(without(events, place)), lockstep=lockstep) is not None
    for place in routed[:6]:
        if isinstance(events[place - 1], Asked):
            assert decided_again(swapped(events, place - 1, place), lockstep=lockstep) is not None


def test_a_recall_is_told_with_what_goes_on():
    events: list[Event] = []
    log = EventLog(None)
    log.subscribe(events.append)
    model = tiny_model()
    replicas = [ThreadReplica(model, name, max_slots=8, pause=0.002) for name in "ab"]
    pool = ReplicaPool(replicas, tell=log.emit, patience=60)
    try:
        for replica in replicas:
            replica.stall(1)
        pool.submit([request(n) for n in range(12)])
        for replica in replicas:
            replica.until_stalled()
        replicas[0].kill()
        replicas[1].go_on()
        ended = 0
        while ended < 12:
            ended += len(pool.step(1.0))
    finally:
        pool.close()
        for replica in replicas:
            replica.close()
    recalls = [event for event in events if isinstance(event, Recall)]
    assert len(recalls) == 1 and len(recalls[0].keys) > 1
    assert decided_again(events, lockstep=False) is None
    place = places(events, Recall)[0]
    assert decided_again(changed(events, place, keys=recalls[0].keys[::-1]), lockstep=False) is not None
