"""Runs of several attempts: work that was lost and done again, other settings, and other beginnings, are told apart."""

import shutil
from pathlib import Path

import pytest

from rlctl.cli import main
from rlctl.config.saved import read_saved
from rlctl.experience.event_log import read_events
from rlctl.experience.events import RunStarted, StepEnded
from rlctl.experience.schedule_events import ScheduleBegan
from tests.replay.scheduling.schedules import changed, places, require_named, statuses, told, without

ARGUMENTS = [
    "run.threads=1", "run.checkpoint_every=1", "run.keep_checkpoints=9", "run.validate_prompts=0",
    "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=4", "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=64", "trainer.mode=colocate_async",
]  # fmt: skip


def train(folder: Path, *arguments: str) -> None:
    assert main(["train", "--quiet", *arguments, "--run-dir", str(folder)]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Nine steps, of which six are lost; three again with more ahead, the last one lost; two with less."""
    folder = tmp_path_factory.mktemp("attempts") / "run"
    train(folder, *ARGUMENTS, "run.steps=9")
    for lost in range(4, 10):
        shutil.rmtree(folder / "ckpt" / f"step_{lost}")
    train(folder, "--resume", "auto", "run.steps=6", "trainer.max_staleness=3", "trainer.warmup_batches=2")
    shutil.rmtree(folder / "ckpt" / "step_6")
    train(folder, "--resume", "auto", "run.steps=7", "trainer.max_staleness=1", "trainer.warmup_batches=1")
    return folder


def test_every_attempt_is_exact_under_its_own_settings(run):
    events = read_events(run / "events.jsonl").events
    assert [event.from_step for event in events if isinstance(event, RunStarted)] == [0, 3, 5]
    began = [event for event in events if isinstance(event, ScheduleBegan)]
    assert [len(event.groups) > 0 for event in began] == [False, True, True]
    findings = told(events, read_saved(run / "config.json").config)
    assert statuses(findings) == ["exact"] * 7, findings


def test_an_attempt_that_begins_elsewhere_is_named(run):
    events, config = read_events(run / "events.jsonl").events, read_saved(run / "config.json").config
    for place in places(events, ScheduleBegan)[1:]:
        event = events[place]
        found = require_named(told(changed(events, place, selected=event.selected - 1), config), event.seq)
        assert "selected" in found.reason
        require_named(told(changed(events, place, groups=event.groups[:-1]), config), event.seq)


def test_a_line_that_is_missing_between_attempts_is_named(run):
    events, config = read_events(run / "events.jsonl").events, read_saved(run / "config.json").config
    for place in [p for p in places(events, RunStarted) if p]:
        require_named(told(without(without(events, place - 1), place - 2), config))


def test_lost_work_is_compared_too(run):
    events, config = read_events(run / "events.jsonl").events, read_saved(run / "config.json").config
    ended = places(events, StepEnded, lambda event: event.attempt == 0 and event.step == 7)
    assert ended
    require_named(told(changed(events, ended[0], step=8), config), events[ended[0]].seq)
