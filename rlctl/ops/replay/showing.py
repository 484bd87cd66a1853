"""What a reader is shown of a run: its timeline, and chosen steps with their samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.experience.records.errors import RecordError
from rlctl.ops.replay.history import History
from rlctl.ops.replay.samples import Sample, samples_of
from rlctl.ops.replay.steps import TrainedStep
from rlctl.ops.replay.texts import decoder_of
from rlctl.ops.replay.timeline import Timeline, timeline


@dataclass(frozen=True)
class ShownStep:
    """A step with its samples.

    Attributes:
        step: as the events tell it.
        samples: those that are shown.
        total: how many it has.
        source: ``record``, ``events``, or ``nothing`` where no record can be read and no event tells.
        fault: why its record was not used.
        mean_gap, max_gap: of the log-probs, over all its samples, by token; None without a record.
        ages: staleness in versions -> tokens, over all its samples.
    """

    step: TrainedStep
    samples: Sequence[Sample]
    total: int
    source: str
    fault: str
    mean_gap: float | None
    max_gap: float | None
    ages: dict[int, int]


@dataclass(frozen=True)
class Shown:
    """A run as it is shown."""

    history: History
    timeline: Timeline
    steps: Sequence[ShownStep]

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        line = self.timeline
        return {
            "timeline": {
                "begin": line.begin,
                "end": line.end,
                "lanes": [{"name": lane.name, "busy_seconds": lane.busy, "spans": lane.spans} for lane in line.lanes],
                "marks": line.marks,
            },
            "steps": [
                {
                    "step": shown.step.step,
                    "version": shown.step.version,
                    "attempt": shown.step.attempt,
                    "failure": shown.step.failure,
                    "source": shown.source,
                    "fault": shown.fault or None,
                    "metrics": shown.step.metrics,
                    "stages": shown.step.stages,
                    "staleness_tokens": {str(age): shown.ages[age] for age in sorted(shown.ages)},
                    "logprob_gap": {"mean": shown.mean_gap, "max": shown.max_gap},
                    "samples_in_all": shown.total,
                    "samples": shown.samples,
                }
                for shown in self.steps
            ],
        }


def show_run(
    history: History,
    steps: Sequence[int],
    most: int,
    advance: Callable[[float], None] = lambda _: None,
) -> Shown:
    """Return steps that ended or failed, at least one and in order, with at most ``most`` samples each, evenly
    spaced."""
    decode = decoder_of(history)
    shown = []
    for number in steps:
        step, fault, bundle = replace(history.begun.get(number) or TrainedStep(number)), "", None
        try:
            bundle = history.bundle(number)
        except RecordError as error:
            fault = f"{error.file.name}: {error.what}"
        if bundle is not None:
            step.recorded(bundle)
        samples = samples_of(step, bundle, decode)
        gaps = [abs(gap) for sample in samples for gap in sample.gaps if gap is not None]
        ages: dict[int, int] = {}
        for sample in samples:
            for age in sample.staleness:
                ages[age] = ages.get(age, 0) + 1
        shown.append(
            ShownStep(
                step,
                _spread(samples, most),
                len(samples),
                "record" if bundle is not None else "events" if number in history.begun else "nothing",
                fault,
                sum(gaps) / len(gaps) if gaps else None,
                max(gaps, default=None),
                ages,
            )
        )
        advance(1)
    begun = [piece.begin for one in shown for told in one.step.samples for piece in told.pieces[:1]]
    failed = {one.step.step: one.step.failure for one in shown if one.step.failure is not None}
    line = timeline(history.events, steps[0], steps[-1], since=min(begun, default=math.inf), failed=failed)
    return Shown(history, line, shown)


def _spread(samples: Sequence[Sample], most: int) -> list[Sample]:
    if len(samples) <= most:
        return list(samples)
    # Ends included, so that the stride is no multiple of a group's size.
    return [samples[round(i * (len(samples) - 1) / max(most - 1, 1))] for i in range(most)]
