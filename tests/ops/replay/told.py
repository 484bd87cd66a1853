"""Run folders written by hand, event by event: small, and no model is loaded for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlctl.config import load_config, to_json
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import (
    Dispatched,
    Event,
    Finished,
    RunStarted,
    SegmentMade,
    Selected,
    Stage,
    StepEnded,
    SyncEnded,
)

LR = 5e-5


def write_config(folder: Path, *settings: str) -> None:
    """Save a configuration as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved = load_config("cpu-quickstart", env={}, overrides=list(settings))
    (folder / "config.json").write_text(json.dumps(to_json(resolved)))


def write_events(folder: Path, events: Sequence[Event], attempt: int = 0, start: float = 1000.0) -> None:
    """Append events, one a second."""
    times = iter(range(10**6))
    log = EventLog(folder / "events.jsonl", attempt=attempt, clock=lambda: start + next(times))
    for event in events:
        log.emit(event)
    log.close()


def step_events(step: int, *, reward: float = 1.0, loss: float = 0.5, lr: float = LR, tokens: int = 4) -> list[Event]:
    """Return what a step tells that trains two responses of one prompt, the second over two versions."""
    before = max(0, step - 2)
    return [
        Dispatched(ordinal=step, row=step, samples=2, version=step - 1),
        SegmentMade(ordinal=step, sample=0, turn=0, index=0, tokens=tokens, version=step - 1, replica="0"),
        Finished(ordinal=step, sample=0, tokens=tokens, reason="stop", reward=reward),
        SegmentMade(ordinal=step, sample=1, turn=0, index=0, tokens=3, version=before, replica="1"),
        SegmentMade(ordinal=step, sample=1, turn=0, index=1, tokens=2, version=step - 1, replica="0"),
        Finished(ordinal=step, sample=1, tokens=5, reason="length", reward=0.0),
        Selected(step=step, ordinals=[step], ages=[step - 1 - before]),
        Stage(name="generate", step=step, seconds=5.0),
        Stage(name="update_actor", step=step, seconds=0.5),
        SyncEnded(version=step, status="committed", loaded=1, bytes=8, seconds=0.25),
        StepEnded(
            step=step,
            version=step,
            metrics={"reward": reward / 2, "loss": loss, "lr": lr, "seconds": 9.0 + step, "generate_tokens_per_s": 3.0},
        ),
    ]


def write_run(folder: Path, steps: int = 4, **step: float) -> Path:
    """Write a run of so many equal steps."""
    write_config(folder)
    told: list[Event] = [RunStarted(mode="sync", seed=0)]
    for number in range(1, steps + 1):
        told += step_events(number, **step)  # type: ignore[arg-type]
    write_events(folder, told)
    return folder
