"""Replaying a recorded run: the steps and levels that are asked for, one finding each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rlctl.config import from_json
from rlctl.errors import RlctlError, UsageError
from rlctl.experience.records.errors import AbsentError
from rlctl.experience.records.reading import RecordedRun
from rlctl.replay.findings import Difference, Finding, Level, Steps, absent, chosen_levels, next_lower
from rlctl.replay.hashes import Hashes
from rlctl.replay.log_state import cut_end, of_other_schema, without_end
from rlctl.replay.recompute import recompute
from rlctl.replay.reliving import relived
from rlctl.replay.run_source import RunSource
from rlctl.replay.scheduling.replaying import replay_schedule
from rlctl.replay.step_record import Source
from rlctl.replay.walk import Walk
from rlctl.replay.what_if import config_under, train_under

Progress = Callable[[int, int], None]


def replay(
    run: Path,
    *,
    steps: Steps,
    levels: Sequence[str],
    what_if: Sequence[str] = (),
    on_progress: Progress = lambda done, of: None,  # noqa: ARG005
) -> Iterator[Finding]:
    """Yield what came of each step at each level, level by level.

    Args:
        run: folder of a run; it is only read.
        steps: which of the recorded ones.
        levels: names of levels, or ``all``.
        what_if: ``KEY=VALUE`` settings under which each step is trained instead, from the weights before it; then
            there is one finding a step, of level R2, with the digest and the metrics that came out.
        on_progress: called with how many findings there are so far, and how many there will be.

    Raises:
        RecordError: not the folder of a run.
        UsageError: nothing was recorded, no such step or level, or a setting that a record cannot answer for.
    """
    source = RunSource(run)
    chosen = steps.of(source.steps, list(source.run.pinned))
    wanted = chosen_levels(levels)
    if what_if:
        findings = trained_under(source, chosen, what_if)
        total = len(chosen)
    else:
        findings = _levels(source, chosen, wanted)
        total = len(chosen) * len(wanted)
    done = 0
    for finding in findings:
        done += finding.step in chosen
        on_progress(done, total)
        yield finding


def _levels(source: RunSource, steps: Sequence[int], levels: Sequence[Level]) -> Iterator[Finding]:
    if "R0" in levels:
        hashes = Hashes(source)
        if (of_run := hashes.run_finding()) is not None:
            yield of_run
        yield from map(hashes.finding, steps)
    if "R1" in levels:
        yield from recomputed(source, steps)
    if again := [level for level in levels if level in ("R2", "R3")]:
        yield from relived(source, steps, levels=again)
    if "R4" in levels:
        yield from rescheduled(source.run, steps)


def rescheduled(run: RecordedRun, steps: Sequence[int], *, beyond: bool = False) -> Iterator[Finding]:
    """Yield level R4 of each step, and what is wrong with the schedule outside of any; with ``beyond`` also what
    differs at other steps."""
    found: dict[int, Finding] = {}
    reason = of_other_schema(run)
    try:
        if not reason:
            config = from_json(run.config, str(run.folder / "config.json")).config
            found = {finding.step: finding for finding in replay_schedule(run.events.events, config)}
    except UsageError as error:
        reason = f"the run's configuration cannot be read: {error.message}"
    if 0 not in found and not run.under_way and (cut := cut_end(run)) is not None:
        yield cut
    for step in sorted(found.keys() - set(steps)):
        if (step == 0 or beyond) and found[step].status == "differs":
            yield found[step]
    for step in steps:
        if step in found:
            yield found[step]
        elif reason:
            yield Finding(step=step, level="R4", status="unavailable", reason=reason + next_lower("R4"))
        else:
            yield without_end(run, step)


def recomputed(source: Source, steps: Sequence[int]) -> Iterator[Finding]:
    """Yield level R1 of each step."""
    for step in steps:
        try:
            record = source.step(step)
        except RlctlError as error:
            yield unreadable(step, "R1", error)
        else:
            yield recompute(record)


def trained_under(source: Source, steps: Sequence[int], settings: Sequence[str]) -> Iterator[Finding]:
    """Yield what each step comes to under other settings. Raises UsageError for those that cannot be asked."""
    walk: Walk | None = None
    with ExitStack() as stack:
        for step in steps:
            try:
                record = source.step(step)
            except AbsentError as error:
                yield absent(step, "R2", error)
                continue
            config = config_under(record.config, settings)  # what cannot be asked is told before a model is made
            walk = walk or Walk(source, step, stack)
            yield train_under(walk, record, config, settings)


def unreadable(step: int, level: Level, error: RlctlError) -> Finding:
    """Return the finding of a step whose record cannot be read, or is not what it was."""
    if isinstance(error, AbsentError):
        return absent(step, level, error)
    where = Difference("record", error.where or "record")
    return Finding(step=step, level=level, status="differs", reason=error.message, first_difference=where)
