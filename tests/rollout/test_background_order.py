"""Deterministic runs: what is generated, and what is trained, does not depend on when the trainer's thread gets on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlctl.experience.admission import Admission
from rlctl.experience.events import Aborted, Dispatched, Evicted, Finished, GroupEnded, SegmentMade, Selected
from tests.rollout.background import Side, sleeps, tiny_model

BATCH, STEPS = 4, 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def told(side: Side) -> list[tuple[Any, ...]]:
    """What was told, in order; the pump's and the trainer's side apart, for those two run side by side."""
    pump = (Dispatched, SegmentMade, Finished, GroupEnded, Aborted, Evicted)
    events = [event for event in side.events if isinstance(event, pump)] + side.of(Selected)
    stamps = ("seq", "time", "attempt")
    return [
        (type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__ if name not in stamps))
        for event in events
    ]


def run(model: Any, seed: int, *, ahead: int, rounds: int, dull: bool) -> tuple[Any, ...]:
    """Train ``STEPS`` steps, as a trainer with ``ahead`` batches in the goal does, that naps for random times."""
    side = Side(model, Admission("pacing", BATCH, 2, 1.0, in_order=True, batches=STEPS), max_slots=10)
    nap, trained = sleeps(seed, 0.01), []
    rollouter, buffer = side.rollouter, side.buffer

    def evict() -> None:
        for group in buffer.finished():
            if rollouter.may_evict() and len({response.reward for response in group.ordered}) == 1:
                buffer.evict(group.ordinal)
                side.log.emit(Evicted(ordinal=group.ordinal, why="no signal"))

    rollouter.update_param_version(0)
    for step in range(1, STEPS + 1):
        goal = buffer.goal(step - 1, ahead)
        rollouter.start(lambda goal=goal: buffer.selected + buffer.prefix() >= goal)
        for _ in range(rounds):
            nap()
            groups = side.take(step, BATCH // rounds, until=evict if dull else None)
            trained += [(r.key, r.token_ids, r.logprobs, r.versions, r.reward) for g in groups for r in g.ordered]
        nap()
        rollouter.wait_held(30.0)
        side.sync(step)
    rollouter.stop()
    return trained, told(side)


@pytest.mark.parametrize(("ahead", "rounds", "dull"), [(0, 1, False), (1, 2, False), (1, 1, True), (0, 2, True)])
def test_the_trainers_pace_changes_nothing(model: Any, ahead: int, rounds: int, dull: bool) -> None:
    expected = run(model, 0, ahead=ahead, rounds=rounds, dull=dull)
    versions = {version for _, _, _, seen, _ in expected[0] for version in seen}
    assert len(versions) >= 3
    mixed = [key for key, _, _, seen, _ in expected[0] if len(set(seen)) > 1]
    # Goals without what is ahead leave requests under way at a sync: they are cut and go on.
    assert bool(mixed) == (ahead == 0)
    assert any(name == "Evicted" for name, *_ in expected[1]) == dull
    for seed in range(1, 3):
        assert run(model, seed, ahead=ahead, rounds=rounds, dull=dull) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dull", [False, True])
def test_thirty_trainers_agree(model: Any, dull: bool) -> None:
    expected = run(model, 0, ahead=0, rounds=2, dull=dull)
    for seed in range(1, 30):
        assert run(model, seed, ahead=0, rounds=2, dull=dull) == expected


def test_a_goal_that_the_data_cannot_reach_holds_too(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 1, 1.0, in_order=True), size=6)
    side.rollouter.update_param_version(0)
    side.rollouter.start(lambda: False)
    side.rollouter.wait_held(30.0)
    assert [group.ordinal for group in side.buffer.finished()] == list(range(6))
    assert [len(side.take(step, 4)) for step in (1, 2)] == [4, 2]
    side.rollouter.stop()


def test_held_is_over_as_soon_as_there_is_another_goal(model: Any) -> None:
    side = Side(model, Admission("pacing", 2, 4, 4.0, in_order=True))
    side.rollouter.update_param_version(0)
    threads = []
    for goal in range(1, 9):
        side.rollouter.start(lambda goal=goal: side.buffer.prefix() >= goal)
        side.rollouter.wait_held(30.0)
        assert side.buffer.prefix() >= goal
        threads.append(threading.active_count())
    assert threads[-1] <= threads[0] + 2, "one goal after the other leaves no threads behind"
    side.rollouter.stop()
