"""Generating in a thread of its own while another trains: the bound holds, nothing is lost, errors end the run."""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.admission import Admission
from rlctl.experience.events import Aborted, Dispatched, Evicted, Finished, GroupEnded, SegmentMade, Selected
from rlctl.rollout.base import Output
from tests.rollout.background import SAMPLES, Count, Side, sleeps, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize(("staleness", "warmup", "rounds"), [(0, 0.0, 1), (1, 1.0, 2), (3, 1.5, 2)])
def test_a_trainer_and_a_pump_side_by_side(model: Any, staleness: int, warmup: float, rounds: int) -> None:
    side, nap = Side(model, Admission("pacing", 4, staleness, warmup)), sleeps(3, 0.02)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    try:
        for step in range(1, 7):
            for _ in range(rounds):
                groups = side.take(step, 4 // rounds)
                assert max(step - 1 - group.oldest_version for group in groups) <= staleness
                nap()
            side.sync(step)
    finally:
        side.rollouter.stop()
    trained = [ordinal for event in side.of(Selected) for ordinal in event.ordinals]
    assert len(trained) == len(set(trained)) == 24
    assert max(age for event in side.of(Selected) for age in event.ages) <= staleness
    dispatched = side.of(Dispatched)
    assert [event.ordinal for event in dispatched] == list(range(len(dispatched)))
    for event in dispatched:
        assert event.ordinal < (event.version + 1 + min(staleness, warmup)) * 4


def test_the_end_of_the_data_is_a_shorter_batch(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 1, 1.0), size=10)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    sizes = []
    for step in range(1, 5):
        sizes.append(len(side.take(step, 4)))
        side.sync(step)
    side.rollouter.stop()
    assert sizes == [4, 4, 2, 0]
    assert sorted(o for event in side.of(Selected) for o in event.ordinals) == list(range(10))


def test_an_error_of_the_pump_is_raised_at_once_where_somebody_waits(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 0))
    side.rollouter.update_param_version(0)
    side.engine.sleep(2)
    side.rollouter.start()
    with pytest.raises(RlctlError, match="asleep"):
        side.take(1, 4)
    with pytest.raises(RlctlError, match="asleep"):
        side.rollouter.held()
    with pytest.raises(RlctlError, match="asleep"):
        side.rollouter.stop()
    side.rollouter.stop()


def test_a_slow_reward_does_not_stop_decoding(model: Any) -> None:
    release = threading.Event()
    side = Side(model, Admission("pacing", 4, 1, 1.0), slow=lambda: float(not release.wait(60)))
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    with side.buffer.changed:
        whole = lambda: sum(len(group.under_way) for group in side.buffer.unfinished()) == 8 * SAMPLES  # noqa: E731
        assert side.buffer.changed.wait_for(whole, 60)
    assert not side.of(Finished)
    assert not side.rollouter.held()
    assert "16 responses wait for their reward" in side.rollouter.describe()
    release.set()
    assert len(side.take(1, 4)) == 4
    side.rollouter.stop()


def test_an_error_of_the_thread_that_scores_is_raised_too(model: Any) -> None:
    def broken() -> float:
        raise RuntimeError("no score today")

    side = Side(model, Admission("pacing", 4, 0), slow=broken)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    with pytest.raises(RuntimeError, match="no score today"):
        side.take(1, 4)
    with pytest.raises(RuntimeError, match="no score today"):
        side.rollouter.stop()


def test_what_can_never_come_is_an_error_and_what_comes_late_is_one_after_the_timeout(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 0))
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    with pytest.raises(RlctlError, match="nothing is being generated"):
        side.rollouter.run(lambda: side.buffer.ready(5, 0))
    side.rollouter.pause()
    with pytest.raises(RlctlError, match=r"after 0\.05 s.*paused by sync"):
        side.rollouter.run(lambda: side.buffer.ready(5, 0), 0.05)
    side.rollouter.stop()


def test_pausing_hands_nothing_over_and_takes_what_ends(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 1, 1.0))
    side.rollouter.update_param_version(0)
    side.rollouter.pause()
    side.rollouter.start()
    side.rollouter.wait_held(30.0)
    assert not side.of(Dispatched)
    # Once something runs, it ends, and what a new version would admit is not begun.
    side.log.subscribe(lambda event: side.rollouter.pause() if isinstance(event, Dispatched) else None)
    side.rollouter.resume()
    side.rollouter.run(lambda: len(side.of(GroupEnded)) == 8, 60)
    side.rollouter.update_param_version(1)
    side.rollouter.wait_held(30.0)
    assert len(side.of(Dispatched)) == 8
    side.rollouter.resume()
    side.rollouter.run(lambda: len(side.of(Dispatched)) == 12, 60)
    side.rollouter.stop()
    side.rollouter.stop()


def test_held_out_prompts_are_answered_meanwhile(model: Any) -> None:
    plain = Side(model, Admission("pacing", 4, 1, 1.0))
    held_out = Count().held_out(6)
    expected = plain.rollouter.evaluate(held_out)
    side = Side(model, Admission("pacing", 4, 1, 1.0))
    future = side.rollouter.update_param_version(0, validate=held_out)
    side.rollouter.start()
    assert len(side.take(1, 4)) == 4
    assert future.result(60) == expected
    assert side.rollouter.update_param_version(0).result(0) is None
    side.rollouter.stop()


@pytest.mark.parametrize("partial", [True, False])
def test_interrupted_responses_go_on_or_begin_again(model: Any, partial: bool) -> None:
    side = Side(model, Admission("pacing", 4, 0), longest=100, partial=partial)
    step, ticks = side.engine.step, itertools.count()
    # As a pool does: what a sync has aborted comes out of a step.
    side.engine.step = lambda: step() + (side.engine.abort() if next(ticks) in (2, 4, 6) else [])  # type: ignore[method-assign]
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    groups = side.take(1, 4)
    side.rollouter.stop()
    stats = side.rollouter.take_stats()
    told = side.of(Aborted)
    assert stats.aborted == sum(len(event.keys) for event in told) > 0
    assert stats.kept_tokens == sum(event.kept for event in told)
    assert stats.lost_tokens == sum(event.lost for event in told)
    assert (stats.kept_tokens > 0, stats.lost_tokens > 0) == (partial, not partial)
    made = sum(response.sampled for group in groups for response in group.ordered)
    assert stats.tokens == made + stats.lost_tokens


def test_saving_loses_no_token_even_where_new_weights_would(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 0), longest=100, partial=False)
    side.rollouter.update_param_version(0)
    step, ticks = side.engine.step, itertools.count()

    def step_until_held() -> list[Output]:
        """Do not get on while nobody saves: everything would be finished."""
        with side.buffer.changed:
            while next(ticks) > 3 and not state and not side.rollouter._pump._holders:
                side.buffer.changed.wait(0.01)
        return step()

    state: dict[str, Any] = {}
    side.engine.step = step_until_held  # type: ignore[method-assign]
    side.rollouter.start()
    side.rollouter.run(lambda: side.engine.num_running > 0)
    state |= side.rollouter.state()
    groups = side.take(1, 4)
    side.rollouter.stop()
    assert {event.why for event in side.of(Aborted)} == {"checkpoint"} and side.rollouter.take_stats().lost_tokens == 0
    again = Side(model, Admission("pacing", 4, 0), longest=100, partial=False)
    again.rollouter.load(state)
    again.rollouter.update_param_version(0)
    again.rollouter.resubmit()
    again.rollouter.start()
    assert [r.token_ids for g in again.take(1, 4) for r in g.ordered] == [
        r.token_ids for g in groups for r in g.ordered
    ]
    again.rollouter.stop()


def test_a_turn_that_does_not_end_is_not_waited_for_for_ever(model: Any) -> None:
    release, entered = threading.Event(), threading.Event()

    def stuck() -> float:
        entered.set()
        return float(not release.wait(60))

    side = Side(model, Admission("pacing", 4, 0), slow=stuck)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    assert entered.wait(60)
    hold = side.rollouter._judge.hold(0.05)
    with pytest.raises(RlctlError, match="the thread that scores does not come to rest"), hold:
        pass
    release.set()
    assert len(side.take(1, 4)) == 4
    side.rollouter.stop()


def test_dropping_evicts_what_is_too_old_and_makes_as_many_anew(model: Any) -> None:
    side = Side(model, Admission("drop", 4, 0, 2.0))
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    for step in range(1, 6):
        side.rollouter.wait_held(30.0)
        assert all(group.oldest_version == step - 1 for group in side.take(step, 4))
        side.sync(step)
    side.rollouter.stop()
    evicted, trained = side.of(Evicted), [o for event in side.of(Selected) for o in event.ordinals]
    assert evicted and all(event.why == "stale" and event.age == 1 for event in evicted)
    assert len(side.buffer) + len(evicted) + len(trained) == len(side.of(Dispatched))


def test_the_log_alone_tells_what_was_in_the_buffer_at_every_choice(model: Any) -> None:
    """Admission and selection, told again from arrivals and completions."""
    admission = Admission("pacing", 4, 2, 1.0)
    side, nap = Side(model, admission), sleeps(9, 0.02)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    for step in range(1, 7):
        side.take(step, 2)
        nap()
        side.take(step, 2)
        side.sync(step)
    side.rollouter.stop()
    assert [event.seq for event in side.events] == list(range(len(side.events)))
    waiting: dict[int, Dispatched] = {}
    ended: set[int] = set()
    left: dict[int, int] = {}
    oldest: dict[int, int] = {}
    selected = 0
    for event in side.events:
        if isinstance(event, Dispatched):
            assert len(waiting) + selected < admission.limit(event.version)
            waiting[event.ordinal], left[event.ordinal] = event, event.samples
        elif isinstance(event, SegmentMade):
            oldest[event.ordinal] = min(event.version, oldest.get(event.ordinal, event.version))
        elif isinstance(event, Finished):
            left[event.ordinal] -= 1
        elif isinstance(event, GroupEnded):
            assert left[event.ordinal] == 0
            ended.add(event.ordinal)
        elif isinstance(event, Selected):
            version = event.step - 1
            standing = [
                Standing(o, d.version, oldest.get(o, d.version), o in ended) for o, d in sorted(waiting.items())
            ]
            chosen = admission.choose(standing, len(event.ordinals), version=version, selected=selected)
            assert chosen == event.ordinals
            assert event.ages == [version - oldest[ordinal] for ordinal in event.ordinals]
            selected += len(chosen)
            for ordinal in chosen:
                del waiting[ordinal]


class Standing(NamedTuple):
    """See ``rlctl.experience.admission.Standing``."""

    ordinal: int
    dispatched: int
    oldest_version: int
    finished: bool
