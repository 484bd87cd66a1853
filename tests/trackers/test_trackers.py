"""Figures reach trackers, and whatever a tracker does, the run goes on and ends in time."""

import json
import time
from pathlib import Path

import pytest

from rlctl.errors import FindingsError, UnavailableError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Noted, RunEnded, StepEnded, Validated
from rlctl.ops.resolve import resolve
from rlctl.trackers.base import RunInfo
from rlctl.trackers.listener import Trackers
from rlctl.trackers.registry import TRACKERS, require_trackers

PATIENCE = 2.5


class Watched:
    """Trackers of tests.trackers.targets under an event log that keeps its events."""

    def __init__(self, folder: Path, *names: str, patience: float = 20.0) -> None:
        self.log, self.events = EventLog(None), list[Event]()
        self.log.subscribe(self.events.append)
        self.folder = folder
        run = RunInfo("p", "n", "i", str(folder), {"a": {"b": 1}})
        targets = {name: f"tests.trackers.targets:{name}" for name in names}
        self.trackers = Trackers(targets, run, self.log, patience=patience, output=folder / "output")

    def steps(self, count: int) -> None:
        for step in range(1, count + 1):
            self.log.emit(StepEnded(step=step, version=step, metrics={"reward": step / 8}))

    def end(self, status: str = "done") -> None:
        self.log.emit(RunEnded(step=1, status=status))
        self.trackers.finish()

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Noted)]

    def lines(self, name: str) -> list[object]:
        return [json.loads(line) for line in (self.folder / name / "lines").read_text().splitlines()]


def test_steps_evaluations_and_the_end_arrive_in_order(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "Lines")
    watched.log.emit(Validated(step=0, accuracy=0.25, by_label={"k=2": 0.5}, prompts=4))
    watched.steps(2)
    watched.end()
    assert watched.lines("Lines") == [
        [0, {"eval/accuracy": 0.25, "eval/accuracy/k=2": 0.5}],
        [1, {"train/reward": 0.125}],
        [2, {"train/reward": 0.25}],
        "done",
    ]
    assert watched.notes == ["tracker Lines: writing lines"]


def test_a_slow_tracker_holds_nothing_up_and_loses_nothing(tmp_path: Path) -> None:
    watched, steps = Watched(tmp_path, "Slow"), 100
    begin = time.monotonic()
    watched.steps(steps)
    assert time.monotonic() - begin < 0.02 * steps
    watched.end()
    assert [line[0] for line in watched.lines("Slow")[:-1]] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FailsToOpen", "ValueError: no such project"),
        ("Fails", "ConnectionError: server gone for good"),
        ("Leaves", "SystemExit: 3"),
        ("Crashes", "its process died: SIGSEGV"),
        ("Hangs", "no answer within 2.5 s"),
        ("NeverEnds", "within 2.5 s"),
        ("Absent", "AttributeError"),
    ],
)
def test_a_failing_tracker_is_told_of_once_and_the_others_go_on(tmp_path: Path, name: str, why: str) -> None:
    watched = Watched(tmp_path, name, "Lines", patience=PATIENCE)
    watched.steps(40)
    begin = time.monotonic()
    watched.end()
    assert time.monotonic() - begin < PATIENCE + 4
    told = [note for note in watched.notes if note.startswith(f"tracker {name} is left out")]
    assert len(told) == 1
    assert why in told[0]
    assert watched.lines("Lines")[-1] == "done"
    assert len(watched.lines("Lines")) == 41


def test_trackers_that_hang_share_one_wait_at_the_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "NeverEnds", "Hangs", "Lines", patience=PATIENCE)
    watched.steps(3)
    begin = time.monotonic()
    watched.end("preempted")
    assert time.monotonic() - begin < 2 * PATIENCE
    assert watched.lines("Lines")[-1] == "preempted"
    assert sum("is left out" in note for note in watched.notes) == 2


def test_a_tracker_without_its_package_is_refused_with_the_line_that_installs_it() -> None:
    from tests.trackers.targets import NeedsMore

    TRACKERS.register("needs_more", NeedsMore)
    with pytest.raises(UnavailableError, match="needs the package no-such-package") as caught:
        require_trackers(["needs_more"])
    assert "pip install no-such-package, or pip install 'rlctl[trackers]'" in str(caught.value)


def test_an_unknown_tracker_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(FindingsError, match=r"did you mean 'wandb'\?"):
        resolve(env={}, overrides=["run.trackers=[tensorboard,wandbb]"])
    assert resolve(env={}, overrides=["run.trackers=[tensorboard,wandb]"]).config.run.trackers == [
        "tensorboard",
        "wandb",
    ]
