"""Levels R2 and R3 of several steps, on one way through all versions that they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

from rlctl.errors import RlctlError
from rlctl.replay.findings import Finding, Level, next_lower
from rlctl.replay.regenerate import Regeneration, versions_of
from rlctl.replay.step_record import Source
from rlctl.replay.walk import UnreachableError, Walk, rerun
from rlctl.rollout.recorded.trajectories import NAME


def relived(source: Source, steps: Sequence[int], *, levels: Collection[Level]) -> Iterator[Finding]:
    """Yield the levels ``R2`` and ``R3``, those that are among ``levels``, of each step."""
    with ExitStack() as stack:
        try:
            walk = Walk(source, _readable(source, steps), stack)
            made = Segments(walk, source, steps, stack) if "R3" in levels else None
        except RlctlError as error:
            reason = f"the run's models cannot be made here: {error.message}{next_lower('R2')}"
            for step in steps:
                for level in levels:
                    yield Finding(step=step, level=level, status="unavailable", reason=reason)
            return
        versions = {step - 1 for step in steps} | (made.versions if made is not None else set())
        for version in sorted(versions):
            if made is not None:
                made.at(version)
            if version + 1 not in steps:
                continue
            if "R2" in levels:
                yield rerun(walk, source, version + 1)
            if made is not None:
                yield made.finding(version + 1)


class Segments:
    """The segments of several steps, made again version by version.

    Args:
        walk: to the versions.
        source: the record.
        steps: whose segments.
        stack: closing it frees the engine.
    """

    def __init__(self, walk: Walk, source: Source, steps: Sequence[int], stack: ExitStack) -> None:
        self._walk = walk
        self._again = Regeneration(walk, source, stack)
        self._asked: dict[int, list[int]] = {}
        self._missed: dict[int, str] = {}
        for step in steps:
            try:
                record = source.step(step)
                engine, _, path = record.config.rollout.engine.partition(":")
                if engine == NAME:
                    self._missed[step] = f"its tokens came from {path}: nothing generated them"
                    continue
                for version in versions_of(record.rounds):
                    self._asked.setdefault(version, []).append(step)
            except RlctlError as error:
                self._missed[step] = error.message

    @property
    def versions(self) -> set[int]:
        """Versions that made the segments."""
        return set(self._asked)

    def at(self, version: int) -> None:
        """Make what ``version`` made."""
        for step in self._asked.get(version, ()):
            try:
                self._walk.go_to(version)
                if (parted := self._walk.parted) is not None:
                    raise UnreachableError(
                        f"step {parted} does not come out as it was recorded, so the weights of version {version} are "
                        "not those that made its tokens"
                    )
                self._again.at(version, step)
            except UnreachableError as reason:
                self._missed.setdefault(step, str(reason))
            except RlctlError as error:
                self._missed.setdefault(step, f"the weights of version {version} cannot be had: {error.message}")

    def finding(self, step: int) -> Finding:
        """Return what came of a step, all of whose versions were passed."""
        if step in self._missed:
            reason = f"{self._missed[step]}{next_lower('R3')}"
            return Finding(step=step, level="R3", status="unavailable", reason=reason)
        return self._again.finding(step)


def _readable(source: Source, steps: Sequence[int]) -> int:
    """Return the first step whose record can be read; the first of all when none can."""
    for step in steps:
        try:
            source.step(step)
        except RlctlError:
            continue
        return step
    return steps[0]
