"""What a run keeps of each step, and what it takes on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.experience.records.manifest import RECORDS, Failure
from rlctl.ops.replay.history import CHECKPOINTS, History, size_of

_FIGURES = ("reward", "loss", "grad_norm", "staleness", "logprob_gap")
_PARTS = {"events": "events.jsonl", "records": RECORDS, "checkpoints": CHECKPOINTS, "final": "final"}


@dataclass(frozen=True)
class ListedStep:
    """What is kept of a step.

    Attributes:
        step: its number; 0 is the model before training.
        attempt: which start of the run made it.
        samples: responses that it trained.
        kept: what is kept: ``events``, ``record``, ``checkpoint``.
        nbytes: of its record and its checkpoint.
        figures: of its metrics, those that a reader looks for first.
        anomaly: why its record is kept beyond the window.
        ended: whether the events have its end, or it needs none.
        failure: why it has none.
    """

    step: int
    attempt: int
    samples: int
    kept: list[str]
    nbytes: int
    figures: dict[str, float] = field(default_factory=dict)
    anomaly: list[str] = field(default_factory=list)
    ended: bool = True
    failure: Failure | None = None


@dataclass(frozen=True)
class Listing:
    """All steps of a run, and bytes on disk by part of the folder."""

    steps: list[ListedStep]
    sizes: dict[str, int]

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"steps": self.steps, "bytes": self.sizes}


def list_run(history: History, chosen: Sequence[int]) -> Listing:
    """Return what a run keeps of chosen steps, and its bytes on disk."""
    steps = []
    for number in chosen:
        step = history.begun.get(number)
        places = {
            "record": history.record_folder(number) if number in history.recorded else None,
            "checkpoint": history.checkpoint_folder(number) if number in history.checkpoints else None,
        }
        kept = (["events"] if step is not None else []) + [name for name, place in places.items() if place is not None]
        metrics: Mapping[str, float] = step.metrics if step is not None else {}
        pin = history.pinned.get(number)
        steps.append(
            ListedStep(
                number,
                step.attempt if step is not None else 0,
                len(step.samples) if step is not None else 0,
                kept,
                sum(size_of(place) for place in places.values() if place is not None),
                {name: metrics[name] for name in _FIGURES if name in metrics},
                list(pin.why) if pin is not None else [],
                step is None or step.version is not None,
                history.failed.get(number),
            )
        )
    sizes = {name: size_of(history.path / part) for name, part in _PARTS.items()}
    return Listing(steps, {**sizes, "all": size_of(history.path)})
