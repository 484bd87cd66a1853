"""The packages themselves: what was logged is there, in processes that have no network and no terminal."""

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.config import to_json
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, Noted, RunEnded, StepEnded, Validated
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training
from rlctl.trackers.base import RunInfo
from rlctl.trackers.listener import Trackers
from rlctl.trackers.registry import require_trackers
from rlctl.trackers.wandb import choose_mode, has_key, reachable

SHORT = [
    "run.threads=1", "run.validate_prompts=4", "trainer.prompts_per_step=2",
    "rollout.samples_per_prompt=2", "rollout.max_new_tokens=8", "run.checkpoint_every=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home without logins, and nothing that was set for the packages."""
    set_outside = ("wandb_", "trackio_", "netrc", "http_proxy", "https_proxy", "all_proxy")
    for name in [name for name in os.environ if name.lower().startswith(set_outside)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "home").mkdir()
    yield


def follow(folder: Path, *names: str, from_step: int = 0, steps: range = range(1, 4)) -> list[str]:
    """Run trackers over some steps and return what a person is told."""
    log, events = EventLog(None), list[Event]()
    log.subscribe(events.append)
    run = RunInfo("project", "run", "a1b2", str(folder), {"run": {"seed": 3}}, from_step)
    trackers = Trackers(require_trackers(names), run, log, patience=30.0, output=folder / "output")
    log.emit(Validated(step=0, accuracy=0.25))
    for step in steps:
        log.emit(StepEnded(step=step, version=step, metrics={"reward": step / 8, "odd": float("nan")}))
    log.emit(RunEnded(step=steps[-1], status="done"))
    trackers.finish()
    return [event.message for event in events if isinstance(event, Noted)]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.mark.tensorboard
def test_tensorboard_has_every_figure_and_forgets_lost_steps(tmp_path: Path) -> None:
    assert follow(tmp_path, "tensorboard") == []
    assert scalars(tmp_path / "tensorboard", "train/reward") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert scalars(tmp_path / "tensorboard", "eval/accuracy") == [(0, 0.25)]
    assert follow(tmp_path, "tensorboard", from_step=1, steps=range(2, 3)) == []
    assert scalars(tmp_path / "tensorboard", "train/reward") == [(1, 0.125), (2, 0.25)]


@pytest.mark.wandb
def test_wandb_without_a_key_is_offline_and_asks_nobody(tmp_path: Path) -> None:
    notes = follow(tmp_path, "wandb")
    (run,) = (tmp_path / "wandb" / "wandb").glob("offline-run-*-a1b2")
    assert notes == [
        f"tracker wandb: offline, since there is no WANDB_API_KEY and no login; upload later with: wandb sync {run}"
    ]
    kept = (run / "run-a1b2.wandb").read_bytes()
    assert b"train/reward" in kept
    assert b"eval/accuracy" in kept


def test_the_mode_of_wandb_follows_key_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = "http://127.0.0.1:9"
    assert not reachable(closed)
    assert choose_mode(closed)[0] == "offline"
    (tmp_path / "home" / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    assert has_key("127.0.0.1")
    assert not has_key("api.wandb.ai")
    assert choose_mode(closed) == ("offline", "127.0.0.1 cannot be reached")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert choose_mode(closed) == ("offline", "127.0.0.1 cannot be reached")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode(closed) == (None, "")


@pytest.mark.trackio
def test_trackio_has_every_figure(tmp_path: Path) -> None:
    assert follow(tmp_path, "trackio") == []
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        rows = list(database.execute("select run_name, step, metrics from metrics order by id"))
    found = [(name, step, json.loads(metrics).get("train/reward")) for name, step, metrics in rows]
    assert found == [("run-a1b2", 0, None), *(("run-a1b2", step, step / 8) for step in (1, 2, 3))]


def train(run: RunPath, *overrides: str) -> list[str]:
    """Train in this process and return what a person is told."""
    resolution = resolve_run(run, overrides=[*SHORT, *overrides])
    events: list[Event] = []
    run_training(resolution.config, run, document=to_json(resolution.resolved), listeners=[events.append])
    return [event.message for event in events if isinstance(event, Noted)]


@pytest.mark.tensorboard
@pytest.mark.wandb
def test_a_run_and_its_second_attempt_share_their_trackers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (told,) = train(RunPath(folder, resume=False), "run.trackers=[tensorboard,wandb]", "run.steps=2")
    assert told.startswith("tracker wandb: offline")
    told_again = train(RunPath(folder, resume=True, saved_config=folder / "config.json"), "run.steps=3")
    assert told_again[-1].startswith("tracker wandb: offline")
    rewards = [line["reward"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
    assert scalars(folder / "trackers" / "tensorboard", "train/reward") == [
        (step, pytest.approx(reward)) for step, reward in enumerate(rewards, 1)
    ]
    run_id = (folder / "trackers" / "id").read_text()
    assert len(list((folder / "trackers" / "wandb" / "wandb").glob(f"offline-run-*-{run_id}"))) == 2
