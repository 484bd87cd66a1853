"""Weights through files: each sync writes a version into a folder, and who wants it reads it, then or later.

The folder is on a file system that all members see, or in /dev/shm on one node. Options (``extras``): ``folder`` (by
default one in /dev/shm that ends with trainer 0's engine), ``keep``, the versions that stay (2), and ``anchor_every``
(10): with deltas one of so many versions is whole, and as many stay as who pulls needs. ``version_folder`` says what is
in it, ``pulling`` reads from it outside of a sync.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlctl.errors import UsageError
from rlctl.sync.digest import Bytes
from rlctl.sync.engine import Arrivals, CheckpointEngine, EngineOptions, Kwargs, Member, Metadata, Stream, TransferStats
from rlctl.sync.errors import CorruptedError, PeerLostError, TransferError
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.private_files import telling
from rlctl.sync.protocols import LoadReport
from rlctl.sync.shared_memory import FOLDER, remove_leftovers, segment_name
from rlctl.sync.shares import share
from rlctl.sync.undertaker import Undertaker
from rlctl.sync.version_folder import VersionFolder, Writing, version_name
from rlctl.sync.version_manifest import merged
from rlctl.sync.version_reader import VersionReader
from rlctl.sync.version_writer import VersionWriter, write_piece

KEEP = 2
# With deltas, every so many versions one is whole: who pulls reads from there to the last, and all of them are kept.
ANCHOR_EVERY = 10
# How often a wait looks into the folder: soon at first, for small syncs, then so that a file server is not burdened.
_LOOK_FIRST, _LOOK_LAST = 0.001, 0.05


class FileEngine(CheckpointEngine):
    """See the module."""

    name = "file"
    delivers = "slices"

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        self.senders = options.senders
        self._keep: int = options.extras.get("keep", KEEP)
        if type(self._keep) is not int or self._keep < 1:
            raise UsageError(f"keep={self._keep!r} versions cannot be kept", fix="a whole number from 1 on")
        self._anchor_every: int = options.extras.get("anchor_every", ANCHOR_EVERY)
        if type(self._anchor_every) is not int or self._anchor_every < 1:
            raise UsageError(f"anchor_every={self._anchor_every!r} is no distance", fix="a whole number from 1 on")
        self._since_anchor = 0  # versions written, at trainer 0, the last whole one among them
        self._whole = True  # whether this one is to be
        given: str | None = options.extras.get("folder")
        self._path = Path(given).absolute() if given else None
        self._undertaker: Undertaker | None = None  # of the default folder, if this engine made it
        self._folder: VersionFolder | None = None
        self._writing: Writing | None = None
        self._inside: int | None = None  # descriptor of the folder that is written into
        self._clock = PhaseClock()

    @property
    def leads(self) -> bool:
        """Whether this is the member that publishes."""
        return self.member.role == "trainer" and self.member.rank == 0

    @property
    def sends(self) -> bool:
        """Whether this member is a trainer rank that writes."""
        return self.member.role == "trainer" and self.member.rank < self.senders

    @property
    def extra_nbytes(self) -> int:
        """See CheckpointEngine: the versions in the folder, counted at the member that keeps them."""
        return self._folder.nbytes() if self._folder is not None and self.leads else 0

    def prepare(self, timeout: float | None = None) -> Metadata:
        """See CheckpointEngine. Trainer 0 makes the folder, and removes what killed writers left in it."""
        self._begin(timeout)
        self._leave()
        if not self.leads:
            return {"id": self.id, "senders": self.options.senders}
        if self._folder is None:
            self._folder = VersionFolder(self._path or self._default_path(), self.options.token, create=True)
            self._folder.lock()
        self._writing = self._folder.begin()
        told = {"folder": str(self._folder.path), "place": self._writing.place, "attempt": self._writing.attempt}
        told["whole"] = self._since_anchor >= self._anchor_every
        return {"id": self.id, "senders": self.options.senders, **told}

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine."""
        assert len(metadata) == trainer_world + rollout_world
        lead = metadata[0]
        told = {key: lead[key] for key in ("folder", "place", "attempt", "whole")}
        return [{**told, "senders": min(lead["senders"], trainer_world)} for _ in metadata]

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine. ``folder``, ``place`` and ``attempt`` are trainer 0's; ``senders`` write."""
        self.senders, self._whole = kwargs["senders"], kwargs["whole"]
        self._writing = Writing(kwargs["place"], kwargs["attempt"])
        if not self.leads and (self.sends or self.member.role == "rollout"):
            if self._folder is not None:
                self._folder.close()
                self._folder = None
            self._folder = VersionFolder(self._path or Path(kwargs["folder"]), self.options.token)
        if self.sends:
            assert self._folder is not None
            self._inside = self._folder.enter(self._writing)

    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """See CheckpointEngine."""
        clock = self._clock = PhaseClock()
        gathered = clock.timed("gather", stream)
        mine = gathered if self.layouts is not None else share(gathered, self.member.rank, self.senders)
        if not self.sends:
            deque(mine, maxlen=0)
            return self._close_stats(clock, tensors=0, bytes_moved=0)
        assert self._folder is not None
        assert self._writing is not None
        assert self._inside is not None
        with self._all_or_nothing(gathered), telling(self._folder.path), clock.phase("pack"):
            writer = VersionWriter(
                self._folder.path,
                self._inside,
                self._writing.name,
                self.member.rank,
                version=version,
                base_version=base_version,
                verify=self.options.verify,
                put=self._put_piece,
            )
            try:
                for name, tensor in self._coded(mine, None if self._whole else base_version):
                    writer.add(name, tensor)
                with clock.phase("wire"):
                    self._folder.add_part(self._inside, writer.end())
            finally:
                writer.close()
            if self.leads:
                self._publish(version, base_version)
            self._end_writing()
        return self._close_stats(clock, tensors=writer.tensors, bytes_moved=writer.nbytes)

    def send_slices(self, streams: Mapping[int, Stream], version: int) -> TransferStats:
        """See CheckpointEngine. A slice that several ranks want is written once."""
        assert self.layouts is not None
        owners, rank = self.layouts.owners, self.member.rank
        everything = {name: tensor for stream in streams.values() for name, tensor in stream}
        return self.send_weights([pair for pair in everything.items() if owners.get(pair[0], rank) == rank], version)

    def receive_weights(self, version: int, *, base_version: int | None = None) -> Arrivals:
        """See CheckpointEngine."""
        clock = PhaseClock()
        with self._awaited(clock, version, base_version) as reader, clock.phase("unpack"):
            for pair in reader.tensors():
                with clock.phase("load"):
                    yield pair
            self._end_receipt(clock, reader)

    def receive_into(
        self,
        version: int,
        targets: Mapping[str, torch.Tensor],
        *,
        cast: bool = False,
        base_version: int | None = None,
    ) -> LoadReport:
        """See CheckpointEngine. Each byte is read right into its tensor."""
        clock = PhaseClock()
        with self._awaited(clock, version, base_version) as reader, clock.phase("load"):
            report = reader.into(targets, cast=cast)
            self._end_receipt(clock, reader)
        return report

    def finalize(self) -> None:
        """See CheckpointEngine."""
        self._leave()

    def close(self) -> None:
        """See CheckpointEngine. The folder stays, unless it is the default one."""
        self._leave()
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if self._undertaker is not None:
            self._undertaker.close()
            self._undertaker = None

    # --- inside ---

    def _default_path(self) -> Path:
        remove_leftovers()
        path = FOLDER / segment_name(secrets.token_hex(8), "versions")
        self._undertaker = Undertaker(path)
        return path

    def _put_piece(self, fd: int, piece: Bytes) -> None:
        """Write one piece of a tensor."""
        self._go_on()
        with self._clock.phase("wire"):
            write_piece(fd, piece)

    def _take_piece(self) -> None:
        """Called before one piece of a tensor is read."""
        self._go_on()

    def _go_on(self) -> None:
        self.check_cancelled("between two pieces")
        self.deadline.check(f"{self.member}: moving weights through {self._path or 'the folder'}")

    def _publish(self, version: int, base_version: int | None) -> None:
        assert self._folder is not None
        assert self._writing is not None
        assert self._inside is not None
        parts = []
        with self._clock.phase("wire"):
            for sender in range(self.senders):
                look = _LOOK_FIRST
                while (part := self._folder.part(self._inside, self._writing, sender)) is None:
                    look = self._pause(look, f"waiting for the files of trainer {sender}")
                parts.append(part)
            name = version_name(self._writing.place, version)
            manifest = merged(parts, name, version=version, base_version=base_version, verify=self.options.verify)
            self._since_anchor = self._since_anchor + 1 if manifest.changes else 1
            keep = max(self._keep, self._since_anchor)
            self._folder.publish(self._inside, self._writing, manifest, keep=keep)

    def _pause(self, seconds: float, what: str) -> float:
        """Wait a little; return how long to wait the next time."""
        self.check_cancelled(what)
        self.deadline.check(what)
        time.sleep(min(seconds, self.deadline.remaining))
        return min(seconds * 1.5, _LOOK_LAST)

    @contextmanager
    def _awaited(self, clock: PhaseClock, version: int, base_version: int | None) -> Iterator[VersionReader]:
        """Wait for the version of this sync, open it, and check that it is the one that is due."""
        assert self._folder is not None
        assert self._writing is not None
        look = _LOOK_FIRST
        with clock.phase("wire"):
            while (name := self._folder.find(self._writing.place)) is None:
                if not self._folder.under_way(self._writing.name) and not self._folder.find(self._writing.place):
                    raise PeerLostError("trainer 0 has given up the version", where=str(self._folder.path))
                look = self._pause(look, "waiting for trainer 0 to publish the version")
            try:
                reader = self._folder.open(name)
            except FileNotFoundError as error:
                raise CorruptedError(f"a file of {name} is missing", where=str(self._folder.path)) from error
        with reader:
            reader.require(version, base_version, self.options.verify)
            reader.before_piece = self._take_piece
            if self.layouts is not None:
                reader.skipped = self.layouts.owners.keys() - self.layouts.wanted(self.member.part)
            yield reader

    def _end_receipt(self, clock: PhaseClock, reader: VersionReader) -> None:
        self.summary, read = reader.manifest.summary(), reader.records
        self._close_stats(clock, tensors=len(read), bytes_moved=sum(record.meta.nbytes for record in read))

    @contextmanager
    def _all_or_nothing(self, stream: Stream) -> Iterator[None]:
        """Let the others know at once when this side fails; then take the rest of the ``stream``, on which other
        trainer ranks depend."""
        try:
            yield
        except BaseException as error:
            self._leave()
            if self.member.world > 1 and isinstance(error, TransferError):
                deque(stream, maxlen=0)
            raise

    def _leave(self) -> None:
        """End what is under way. A version that was not published goes, and the others see that."""
        if self._inside is not None and self._folder is not None and not self.leads:
            self._folder.give_up(self._inside, self.member.rank)
        self._end_writing()
        if self._writing is not None and self.leads and self._folder is not None:
            self._folder.discard(self._writing)
        self._writing = None

    def _end_writing(self) -> None:
        if self._inside is not None:
            os.close(self._inside)
            self._inside = None
