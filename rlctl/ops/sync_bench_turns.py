"""Contestants taking turns: one repetition of each, then the next of each (A B C A B C ...)."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.ops.sync_bench_contest import Contestant, RawContestant, Sample, SyncContestant
from rlctl.ops.sync_bench_copy import CopyContestant
from rlctl.ops.sync_bench_in_place import InPlaceContestant
from rlctl.ops.sync_bench_options import BenchOptions, Squad
from rlctl.ops.sync_bench_raw import RAW
from rlctl.ops.sync_bench_remote import OtherHost
from rlctl.process import run_token
from rlctl.sync.calls import call
from rlctl.sync.engine import EngineOptions
from rlctl.sync.traits import BACKEND_TRAITS

Advance = Callable[[], None]


@dataclass
class Entry:
    """A contestant and its repetitions; ``error``: what broke it; ``folder``: what it leaves on a disk."""

    backend: str
    variant: str
    bucket: int | None
    contestant: Contestant
    samples: list[Sample] = field(default_factory=list)
    error: str = ""
    folder: Path | None = None

    def open(self) -> None:
        """Start the contestant."""
        self._attempt(self.contestant.open)

    def rep(self, step: int) -> None:
        """Do a repetition, unless it broke before."""
        self._attempt(lambda: self.samples.append(self.contestant.rep(step)))

    def close(self) -> None:
        """End the contestant, and remove what it left."""
        self.contestant.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.error:
            return
        try:
            work()
        except RlctlError as error:  # it must not cost the others their figures
            self.error = error.message


def take_turns(
    options: BenchOptions, squads: Sequence[Squad], advance: Advance, other: OtherHost | None = None
) -> tuple[list[Sample], list[Entry]]:
    """Return the repetitions of the memory copy, and all others.

    ``advance`` is called after each; ``other``: where the rollout workers are, if not here. Raises OtherHostGoneError.
    """
    copy = CopyContestant(options.tensors, options.rollouts, options.change)
    entries = [entry for squad in squads for entry in _entries(options, squad, other)]
    copies = list[Sample]()
    with ExitStack() as stack:
        stack.callback(copy.close)
        for entry in entries:
            stack.callback(entry.close)
        own = [entry for entry in entries if entry.variant != "raw"]
        # Not a pool: its end would wait for all of them, also after Ctrl-C.
        opening = [call(copy.open, "open the copy"), *(call(entry.open, f"open {entry.backend}") for entry in own)]
        for future in opening:
            future.result()
        for entry in entries:
            if entry.variant == "raw":  # in the processes of one that is open now
                entry.open()
        for step in range(1, options.rounds + 1):
            copies.append(copy.rep(step))
            advance()
            for entry in entries:
                entry.rep(step)
                if other is not None:
                    other.check()
                advance()
            if entries and all(entry.error for entry in entries):
                break
    return copies, entries


def _entries(options: BenchOptions, squad: Squad, other: OtherHost | None) -> list[Entry]:
    extras = dict(options.extras.get(squad.backend, {}))
    if squad.way:
        extras["way"] = squad.way
    traits, folder = BACKEND_TRAITS.get(squad.backend), None
    if traits is not None and traits.folder and "folder" in extras:
        # One for each squad: a folder has one writer.
        folder = Path(extras["folder"]).absolute() / f"rlctl-bench-{secrets.token_hex(8)}"
        extras["folder"] = str(folder)
    engine = EngineOptions(
        bucket_size=squad.bucket,
        timeout=options.timeout,
        verify=options.verify,
        senders=options.trainers,
        token=run_token() if other is None else other.token,
        interface=None if other is None else other.interface,
        extras=extras,
    )
    if traits is not None and traits.in_place:
        devices = InPlaceContestant(
            squad.backend, options.tensors, options.trainers, options.rollouts, engine, change=options.change
        )
        return [Entry(squad.backend, squad.variant, squad.bucket, devices)]
    base = SyncContestant(
        squad.backend,
        options.tensors,
        options.trainers,
        options.rollouts,
        engine,
        change=options.change,
        delta=squad.delta,
        views=squad.views,
        workers=None if other is None else other.members,
    )
    entries = [Entry(squad.backend, squad.variant, squad.bucket, base, folder=folder)]
    if squad.raw:
        entries.append(Entry(squad.backend, "raw", None, RawContestant(base, RAW[squad.backend])))
    return entries
