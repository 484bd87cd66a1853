"""What a replay says: of each step, at each level, whether it came out as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from rlctl.errors import UsageError
from rlctl.experience.records.errors import AbsentError

Level = Literal["R0", "R1", "R2", "R3", "R4"]
Status = Literal["exact", "differs", "unavailable"]

LEVELS: tuple[Level, ...] = get_args(Level)


class Difference(msgspec.Struct, frozen=True):
    """Where two tellings of a step first part.

    Attributes:
        stage: of the step, or what was compared instead: ``record``, ``fingerprint``, ``checkpoint``.
        tensor: column of the rows, parameter, metric, or file.
        max_abs: greatest absolute difference; None where there is no number to it.
    """

    stage: str
    tensor: str
    max_abs: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """How one step came out at one level.

    Attributes:
        step: which; 0 for what belongs to no step.
        level: R0 to R4.
        status: ``exact``, ``differs``, or ``unavailable`` where the level cannot run here.
        reason: of what is not exact, and what an exact one leaves out.
        first_difference: None where nothing differs.
        params_digest: SHA-256 of the parameters after the step as it was run here; empty where it was not.
        metrics: of the step as it was run here, for a what-if.
    """

    step: int
    level: Level
    status: Status
    reason: str = ""
    first_difference: Difference | None = None
    params_digest: str = ""
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class Steps:
    """Which recorded steps to replay.

    Attributes:
        first, last: both included; None for no bound.
        anomalies: only those that were kept because a figure left its band.
    """

    first: int | None = None
    last: int | None = None
    anomalies: bool = False

    def of(self, recorded: Sequence[int], pinned: Sequence[int] = ()) -> list[int]:
        """Return the chosen ones of the ``recorded`` steps; ``pinned`` are the anomalies among them.

        Raises:
            UsageError: none is recorded.
        """
        found = [
            step
            for step in recorded
            if (self.first is None or step >= self.first) and (self.last is None or step <= self.last)
        ]
        if self.anomalies:
            found = [step for step in found if step in set(pinned)]
        if not found:
            which = "anomaly" if self.anomalies else "chosen step"
            kept = f"steps {recorded[0]} to {recorded[-1]} are" if recorded else "none is"
            raise UsageError(
                f"no {which} has a record; {kept} recorded", where="--anomalies" if self.anomalies else "--step"
            )
        return found


def chosen_levels(names: Sequence[str]) -> list[Level]:
    """Return levels by their names, in order; ``R0..R2`` names the first, the last and what lies between, ``all`` every
    one. Raises UsageError for others."""
    wanted = set[Level]()
    for name in names:
        first, dots, last = (f"{LEVELS[0]}..{LEVELS[-1]}" if name.upper() == "ALL" else name.upper()).partition("..")
        ends = [number for number, level in enumerate(LEVELS) for end in (first, last) if end == level]
        if len(ends) != (2 if dots else 1) or (dots and first > last):
            raise UsageError(f"no level {name}", where="--level", fix=f"give {', '.join(LEVELS)}, R0..R2 or all")
        wanted.update(LEVELS[ends[0] : ends[-1] + 1])
    return [level for level in LEVELS if level in wanted]


def next_lower(level: Level) -> str:
    """Return what to say of the level below, which needs less."""
    return f"; try --level {LEVELS[LEVELS.index(level) - 1]}" if level != "R0" else ""


def absent(step: int, level: Level, error: AbsentError) -> Finding:
    """Return the finding of a step for which something is gone that was there when the run was read."""
    reason = f"{error.what}: it was let go while the replay ran"
    return Finding(step=step, level=level, status="unavailable", reason=reason)
