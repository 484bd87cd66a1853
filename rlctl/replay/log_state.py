"""What an event log is, before its schedule is told again: of which schema, and whether its end is there."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.experience.events import SCHEMA, Event, RunEnded, RunStarted
from rlctl.experience.records.errors import RecordError
from rlctl.experience.records.manifest import END
from rlctl.experience.records.reading import RecordedRun, read_bundle
from rlctl.replay.findings import Difference, Finding, next_lower
from rlctl.replay.recompute import of_failure

RESULT = "result.json"


def of_other_schema(run: RecordedRun) -> str:
    """Return that another version of rlctl wrote the log, whose events mean something else; "" where none did."""
    for event in run.events.events:
        if isinstance(event, RunStarted) and event.schema != SCHEMA:
            other = "an older" if event.schema < SCHEMA else "a newer"
            return f"recorded by {other} rlctl: its events are of schema {event.schema}, this one's of {SCHEMA}"
    return ""


def cut_end(run: RecordedRun) -> Finding | None:
    """Return that events are gone from the end of the log of a run that came to one, as of step 0; None otherwise."""
    events = run.events.events
    last = events[-1].seq if events else -1
    if run.end is not None and run.end.last_seq > last:
        reason = f"the log ends with event {last}, and by {END} the run's last event is {run.end.last_seq}"
    elif (run.folder / RESULT).is_file() and not _ended(events):
        reason = f"the log ends with event {last} and without the run's end, and the run has its {RESULT}"
    else:
        return None
    return Finding(
        step=0, level="R4", status="differs", reason=reason, first_difference=Difference("events", f"event {last + 1}")
    )


def _ended(events: Sequence[Event]) -> bool:
    return any(isinstance(event, RunEnded) and event.attempt == events[-1].attempt for event in events)


def without_end(run: RecordedRun, step: int) -> Finding:
    """Return level R4 of a step whose end the log does not have: it failed, has no record, or the log is cut."""
    reason = "the event log has no end of this step"
    try:
        failure = read_bundle(run.folder, step).manifest.failure if step in run.steps else None
    except RecordError as error:
        reason = f"{reason}, and its record cannot be read: {error.what}"
    else:
        if failure is not None:
            reason = f"{reason}: {of_failure(failure)}"
        elif step in run.steps:
            where = Difference("events", f"end of step {step}")
            return Finding(
                step=step, level="R4", status="differs", reason=f"{reason}, which has a record", first_difference=where
            )
    return Finding(step=step, level="R4", status="unavailable", reason=reason + next_lower("R4"))
