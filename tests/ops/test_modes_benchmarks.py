"""The benchmark of the trainer modes and the soak of killed runs: that they see what is wrong, and that they run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.kill_soak import main as kill_soak
from benchmarks.modes import bounds_missed, interval
from benchmarks.modes import main as modes
from benchmarks.run_events import faults_of, groups_per_second, lag_of_tokens, mixed_responses
from rlctl.experience.events import (
    Dispatched,
    Event,
    Evicted,
    GroupEnded,
    SegmentMade,
    Selected,
    StepEnded,
    SyncEnded,
)

ROWS, EPOCHS = 3, 2


def a_run(*, lag: int = 0) -> list[Event]:
    """Six prompts, two a step, each made ``lag`` versions before it is trained."""
    events: list[Event] = [SyncEnded(version=0, status="committed")]
    for step in range(3):
        ordinals = [2 * step, 2 * step + 1]
        for ordinal in ordinals:
            events.append(Dispatched(ordinal=ordinal, row=ordinal % ROWS, samples=1, version=max(0, step - lag)))
            segment = {"turn": 0, "index": 0, "tokens": 5, "replica": "0"}
            events.append(SegmentMade(ordinal=ordinal, sample=0, version=max(0, step - lag), **segment))
        events.append(Selected(step=step + 1, ordinals=ordinals))
        events.append(SyncEnded(version=step + 1, status="committed"))
    return events


def faults(events: list[Event], **more: Any) -> list[str]:
    return faults_of(events, **{"rows": ROWS, "epochs": EPOCHS, "bound": 1, "drops": False, **more})


def test_a_whole_lineage_has_no_fault() -> None:
    assert faults(a_run()) == []
    assert faults(a_run(lag=1)) == []
    assert lag_of_tokens(a_run(lag=1)) == {0: 10, 1: 20}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda e: [*e, Selected(step=4, ordinals=[5])], "prompt 5 was trained 2 times"),
        (lambda e: [x for x in e if not (isinstance(x, Selected) and x.step == 2)], "never trained: [2, 3]"),
        (lambda e: [*e, Evicted(ordinal=1, why="stale")], "prompt 1 was trained and dropped"),
        (lambda e: [*e, Selected(step=4, ordinals=[6])], "no epoch has: [6]"),
        (lambda e: [*e, Dispatched(ordinal=5, row=0, samples=1, version=0)], "row 0 was used 3 times in 2 epochs"),
        (lambda e: a_run(lag=2), "tokens of lag 0 to 2 were trained, and the bound is 1"),
        (lambda e: [x for x in e if not isinstance(x, SegmentMade)], "no token was trained"),
    ],
)
def test_each_fault_is_named(change: Any, fault: str) -> None:
    assert any(fault in one for one in faults(change(a_run())))


def test_drops_are_allowed_where_admission_drops() -> None:
    events = a_run()
    last = next(event for event in events if isinstance(event, Selected) and event.step == 3)
    last.ordinals.remove(5)
    events.append(Evicted(ordinal=5, why="stale"))
    assert faults(events, drops=True) == []
    assert faults(events) == ["prompts were dropped: [5]"]


def test_responses_of_several_versions_are_counted() -> None:
    more = SegmentMade(ordinal=0, sample=0, turn=0, index=1, tokens=2, version=1, replica="0")
    assert mixed_responses([*a_run(), more]) == 1
    assert mixed_responses(a_run()) == 0


def test_what_was_made_before_the_window_is_no_speed() -> None:
    events: list[Event] = [GroupEnded(ordinal=number, status="finished") for number in range(20)]
    for step in range(1, 11):
        events.append(StepEnded(step=step, version=step, metrics={}, time=float(step)))
        events.append(GroupEnded(ordinal=20 + step, status="finished"))
    for number, event in enumerate(events):
        event.seq = number
    assert groups_per_second(events, prompts=4) == 1.0  # four were trained a second, one was made


def test_an_interval_holds_its_mean() -> None:
    found = interval([1.2, 1.3, 1.25, 1.4, 1.1, 1.3, 1.2])
    assert 1.1 < found["low"] < found["ratio"] < found["high"] < 1.4
    assert interval([1.5] * 7) == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})


def test_a_bound_holds_for_the_best_set_up_of_a_mode() -> None:
    ratios = {
        "sync": 1.0,
        "separate_async": 1.39,
        "colocate_async": 1.1,
        "colocate_async, 2 + 2": 1.2,
    }
    assert bounds_missed({name: {"low": low} for name, low in ratios.items()}) == ["separate_async"]
    assert bounds_missed({"sync": {"low": 1.0}, "separate_async": {"low": 1.41}}) == []


def test_the_benchmark_of_modes_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--part", "fixed", "--pairs", "1", "--steps", "6", "--setups", "sync", "colocate_async", "--json"]
    assert modes(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quick"]
    part = found["parts"]["fixed"]
    assert part["best"] == "sync"
    for runs in part["runs"].values():
        assert runs[0]["groups_per_s"] > 0
    assert part["runs"]["sync"][0]["lag_max"] == 0
    assert part["ratios"]["colocate_async"]["ratio"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_runs_that_are_killed_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert kill_soak(["--kills", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["kills"].values()) == 4
