"""A whole run's schedule told again: every attempt from its own events, and one finding for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlctl.experience.event_base import Event
from rlctl.experience.event_log import lineage
from rlctl.experience.events import StepEnded
from rlctl.experience.schedule_events import ScheduleBegan, ScheduleEvent
from rlctl.replay.findings import Difference, Finding
from rlctl.replay.scheduling.attempts import Attempt, attempts_of, numbered, require_joined
from rlctl.replay.scheduling.deciding import Deciding
from rlctl.replay.scheduling.expecting import DisagreementError
from rlctl.replay.scheduling.standing import Standing, config_of
from rlctl.schema import Config

OLD = "the event log was written by a version of rlctl that did not tell what its decisions were made on"


def replay_schedule(events: Sequence[Event], config: Config) -> Iterator[Finding]:
    """Make the decisions of a run again, from its event log and configuration alone, and compare them.

    The buffer, its admission and refill, the balancer of the replicas, the rule of lending devices, the order of weight
    syncs and the message queue are the ones that run; they are driven by what arrived and ended, in the order of the
    log, whatever the clock said. Work that was lost and done again is compared too.

    Args:
        events: of the log, in the order of the file.
        config: of the run, with the mode's defaults; that of its last attempt.

    Yields:
        A finding for each trained step, by step: ``exact`` up to the first difference, whose event is named; what comes
        after it is ``unavailable``, as is what a log of an older version lacks.
    """
    last = {event.step: event.attempt for event in lineage(list(events)) if isinstance(event, StepEnded)}
    found: dict[int, tuple[int, Finding]] = {}
    stopped = ""
    for attempt, finding in _findings(events, config):
        found[finding.step] = attempt, finding
        if finding.status == "differs":
            last[finding.step] = attempt
            stopped = f"the schedule parted at step {finding.step}: {finding.reason}"
            break
    for step in sorted(last):
        here = found.get(step)
        # What was lost and done again counts as it was done last.
        if here is not None and here[0] == last[step]:
            yield here[1]
        else:
            yield Finding(step=step, level="R4", status="unavailable", reason=stopped)


def _findings(events: Sequence[Event], config: Config) -> Iterator[tuple[int, Finding]]:
    """Yield findings in the order in which they are made, each with its attempt."""
    attempts = attempts_of(events)
    try:
        require_joined(attempts)
    except DisagreementError as error:
        yield -1, _differs(0, error)
        return
    wanted = {attempt.from_seq for attempt in attempts}
    stood: dict[int, Standing] = {}
    for attempt in attempts:
        before = stood.get(attempt.from_seq)
        walk = _Walk(attempt, config, before, wanted, last=attempt is attempts[-1])
        for finding in walk.findings():
            yield attempt.number, finding
        stood |= walk.stood


class _Walk:
    """Goes through one attempt."""

    def __init__(
        self, attempt: Attempt, config: Config, before: Standing | None, wanted: set[int], *, last: bool
    ) -> None:
        self._attempt, self._config, self._before, self._last = attempt, config, before, last
        self._wanted = sorted(wanted)
        self._deciding: Deciding | None = None
        self._step = 1
        self.stood: dict[int, Standing] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each step that was trained, up to the first that differs."""
        began = self._attempt.began
        if began is None:
            yield from self._unavailable()
            return
        self._step, steps = began.step + 1, began.steps
        try:
            self._deciding = Deciding(config_of(began, self._config, last=self._last), began)
            if self._before is not None:
                self._before.require(began)
            for event in numbered(self._attempt):
                self._note(event.seq)
                self._deciding.take(event)
                if isinstance(event, StepEnded):
                    yield Finding(step=event.step, level="R4", status="exact")
                    self._step = min(event.step + 1, steps)
            self._note(None)
        except DisagreementError as error:
            yield _differs(self._step, error)

    def _note(self, seq: int | None) -> None:
        """Note where it stands before event ``seq``, if another attempt goes on from there."""
        assert self._deciding is not None
        first = self._attempt.events[0].seq
        while self._wanted and (seq is None or self._wanted[0] < seq):
            mark = self._wanted.pop(0)
            if mark >= first:
                self.stood[mark] = self._deciding.standing()

    def _unavailable(self) -> Iterator[Finding]:
        told = [event for event in self._attempt.events if isinstance(event, ScheduleEvent)]
        if told:
            first = DisagreementError(told[0], "record", f"no {ScheduleBegan.__name__} comes before it")
            yield _differs(1, first)
            return
        for event in self._attempt.events:
            if isinstance(event, StepEnded):
                yield Finding(step=event.step, level="R4", status="unavailable", reason=OLD)


def _differs(step: int, error: DisagreementError) -> Finding:
    difference = Difference(stage=error.stage, tensor=f"event {error.seq}")
    return Finding(step=step, level="R4", status="differs", reason=str(error), first_difference=difference)
