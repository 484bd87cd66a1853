"""Replaying a recorded run: the steps and levels that are asked for, one finding each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from rlctl.errors import RlctlError
from rlctl.replay.findings import Difference, Finding, Level, next_lower
from rlctl.replay.recompute import recompute
from rlctl.replay.regenerate import Regeneration, versions_of
from rlctl.replay.step_record import Source
from rlctl.replay.walk import UnreachableError, Walk, rerun
from rlctl.replay.what_if import config_under, train_under

MakeWalk = Callable[[ExitStack], Walk]


def recomputed(source: Source, steps: Sequence[int]) -> Iterator[Finding]:
    """Yield level R1 of each step."""
    for step in steps:
        try:
            record = source.step(step)
        except RlctlError as error:
            yield unreadable(step, "R1", error)
        else:
            yield recompute(record)


def relived(source: Source, steps: Sequence[int], make: MakeWalk, *, levels: Sequence[Level]) -> Iterator[Finding]:
    """Yield levels R2 and R3 of each step, on one way through all versions that they need."""
    with ExitStack() as stack:
        try:
            walk = make(stack)
        except RlctlError as error:
            for step in steps:
                for level in levels:
                    reason = f"the run's models cannot be had here: {error.message}{next_lower('R2')}"
                    yield Finding(step=step, level=level, status="unavailable", reason=reason)
            return
        again = Regeneration(walk, source, stack) if "R3" in levels else None
        asked: dict[int, list[int]] = {}
        for step in steps if again is not None else ():
            for version in versions_of(source.step(step).rounds):
                asked.setdefault(version, []).append(step)
        missed: dict[int, str] = {}
        for version in sorted({*asked, *(step - 1 for step in steps)}):
            if again is not None:
                _regenerate(walk, again, version, asked.get(version, []), missed)
            if version + 1 not in steps:
                continue
            if "R2" in levels:
                yield rerun(walk, source.step(version + 1))
            if again is not None and version + 1 in missed:
                reason = f"{missed[version + 1]}{next_lower('R3')}"
                yield Finding(step=version + 1, level="R3", status="unavailable", reason=reason)
            elif again is not None:
                yield again.finding(version + 1)


def _regenerate(walk: Walk, again: Regeneration, version: int, steps: Sequence[int], missed: dict[int, str]) -> None:
    """Make the segments that ``version`` made for ``steps``; note why those of a step cannot be."""
    for step in steps:
        try:
            walk.go_to(version)
            if walk.parted is not None:
                raise UnreachableError(
                    f"step {walk.parted} does not come out as it was recorded, so the weights of version {version} "
                    "are not those that made its tokens"
                )
            again.at(version, step)
        except UnreachableError as reason:
            missed.setdefault(step, str(reason))
        except RlctlError as error:
            missed.setdefault(step, f"the weights of version {version} cannot be had: {error.message}")


def trained_under(source: Source, steps: Sequence[int], settings: Sequence[str], make: MakeWalk) -> Iterator[Finding]:
    """Yield what each step comes to under other settings. Raises UsageError for those that cannot be asked."""
    with ExitStack() as stack:
        walk = make(stack)
        for step in steps:
            record = source.step(step)
            yield train_under(walk, record, config_under(record.config, settings), settings)


def unreadable(step: int, level: Level, error: RlctlError) -> Finding:
    """Return the finding of a step whose record cannot be read, or is not what it was."""
    where = Difference("record", error.where or "record")
    return Finding(step=step, level=level, status="differs", reason=error.message, first_difference=where)
