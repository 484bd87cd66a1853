"""All levels of a run in one stream: R0 to R3 from its records, R4 from its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rlctl.experience.event_log import lineage
from rlctl.experience.events import StepEnded
from rlctl.experience.records.reading import RecordedRun, read_run
from rlctl.replay.findings import LEVELS, Finding, Level, Steps, chosen_levels
from rlctl.replay.replaying import replay, rescheduled

Progress = Callable[[int, int], None]
_UNRECORDED = "no record of the step is kept; run.record=batches keeps one of each in its window"


def replay_run(
    run: Path,
    *,
    steps: Steps,
    levels: Sequence[str],
    what_if: Sequence[str] = (),
    on_progress: Progress = lambda done, of: None,  # noqa: ARG005
) -> Iterator[Finding]:
    """Yield what came of each step at each level, level by level; see :func:`rlctl.replay.replaying.replay`.

    Steps that are in the events alone have level R4; of the others they are told to be unavailable where none of the
    chosen steps has a record. Without bounds, every trained step's schedule is told again, recorded or not.

    Raises:
        RecordError: not the folder of a run.
        UsageError: no such step or level, or a setting that a record cannot answer for.
    """
    if what_if:
        yield from replay(run, steps=steps, levels=["R2"], what_if=what_if, on_progress=on_progress)
        return
    found = read_run(run)
    wanted = chosen_levels(levels)
    of_records: list[Level] = [level for level in wanted if level != "R4"]
    recorded = _within(steps, found.steps, found)
    told = {event.step for event in lineage(found.events.events) if isinstance(event, StepEnded)}
    scheduled = _within(steps, {*told, *found.steps}, found)
    if not scheduled:
        steps.of(sorted(told), list(found.pinned))  # raises, and says which there are
    total = len(of_records) * len(recorded or scheduled) + ("R4" in wanted) * len(scheduled)
    done = 0

    def count(finding: Finding) -> Finding:
        nonlocal done
        if (
            finding.step and done < total
        ):  # what belongs to no step, or to others than were asked for, is more than asked
            done += 1
            on_progress(done, total)
        return finding

    if of_records and recorded:
        yield from map(count, replay(run, steps=steps, levels=of_records))
    elif of_records:
        for level in of_records:
            for step in scheduled:
                yield count(Finding(step=step, level=level, status="unavailable", reason=_UNRECORDED))
    if "R4" in wanted:
        yield from map(count, rescheduled(found, scheduled, beyond=steps == Steps()))


def _within(steps: Steps, there: Iterable[int], run: RecordedRun) -> list[int]:
    """Return the chosen ones of the steps that are there, if any."""
    return [
        step
        for step in sorted(there)
        if (steps.first is None or step >= steps.first)
        and (steps.last is None or step <= steps.last)
        and (not steps.anomalies or step in run.pinned)
    ]


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by step, then by level."""
    return sorted(findings, key=lambda finding: (finding.step, LEVELS.index(finding.level)))
