"""A folder of weight versions, each a folder of safetensors files that appears whole or not at all.

    FOLDER/0000000007-v120/              mode 0700; the number before the version counts publications
        shard-0-0.safetensors            mode 0600; of sender 0, its first file
        manifest.json                    names, files, digests, under a code that proves the run's token
    FOLDER/.writing-8-5f0c.../           under way; left by a writer that was killed, it goes with the next prepare

A version is written under a temporary name, brought to the disk and renamed. The writer keeps the last few and removes
older ones. Who reads one has its files open by then: on a POSIX file system they stay readable until they are closed,
whatever happens to their names. (On NFS that holds on the client that removes them; others get an error, not other
bytes.) Everything is opened below the folder's own descriptor and no link is followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from rlctl.sync.errors import CorruptedError, PeerLostError, TransferError
from rlctl.sync.private_files import names_in, nbytes_in, read_small, telling, told_apart, write_whole
from rlctl.sync.version_manifest import Manifest, Part, sealed, unsealed
from rlctl.sync.version_reader import VersionReader

MANIFEST = "manifest.json"
_NAME = re.compile(r"(?P<place>\d{10})-v(?P<version>\d+)")
_WRITING = ".writing-"
_REMOVED = ".removed-"
_LOCK = ".writer"


class Published(NamedTuple):
    """One version in the folder: where it is in the order of publication, its number, its folder."""

    place: int
    version: int
    name: str


class Writing(NamedTuple):
    """A version under way: its place to be, and what tells it from an earlier attempt at the same place."""

    place: int
    attempt: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{_WRITING}{self.place}-{self.attempt}"


class VersionFolder:
    """The folder, open.

    Args:
        path: made with mode 0700 when it is not there.
        token: the run's secret; what was written without it is not read.
        create: whether to make it.

    Raises:
        TransferError: it is not there, not ours, or others may write into it.
    """

    def __init__(self, path: Path, token: str, *, create: bool = False) -> None:
        self.path = path
        self._token = token
        self._lock: int | None = None
        with telling(path):
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            os.close(self._fd)
            raise TransferError(
                "the folder belongs to another user, or others may write into it",
                where=str(path),
                fix="a folder of your own with mode 0700",
            )

    # --- reading ---

    def published(self) -> list[Published]:
        """Return the versions that are there, in the order of their publication; what else lies there is passed by."""
        with telling(self.path):
            names = names_in(self._fd)
        matches = sorted((m for m in map(_NAME.fullmatch, names) if m), key=lambda m: int(m["place"]))
        return [Published(int(m["place"]), int(m["version"]), m.group()) for m in matches]

    def open(self, name: str) -> VersionReader:
        """Open one version for reading: all of its files, so that it may be removed meanwhile.

        Raises FileNotFoundError when it is not there, CorruptedError when it is not what the run wrote.
        """
        where = self.path / name
        fd = self._enter(name)
        try:
            with told_apart(where):
                manifest = unsealed(read_small(MANIFEST, fd), Manifest, self._token)
                if manifest.folder != name:
                    raise CorruptedError(f"its manifest is that of {manifest.folder!r:.80}")
                return VersionReader(where, fd, manifest)
        finally:
            os.close(fd)

    def find(self, place: int) -> str | None:
        """Return the name of the version at a place in the order of publication, if it is there."""
        return next((p.name for p in self.published() if p.place == place), None)

    def under_way(self, writing: str) -> bool:
        """Whether a version is being written, or was when its writer ended."""
        return self._exists(writing)

    # --- writing ---

    def lock(self) -> None:
        """Become the only writer, until ``close``. Raises TransferError when there is one already."""
        if self._lock is not None:
            return
        with telling(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, 0o600, dir_fd=self._fd)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
                raise TransferError(
                    "another run writes into this folder", where=str(self.path), fix="a folder for each run"
                ) from error
        self._lock = lock

    def begin(self) -> Writing:
        """Remove what killed writers left, and make the folder for the next version. This one is locked."""
        assert self._lock is not None
        last = self.published()
        writing = Writing(last[-1].place + 1 if last else 0, secrets.token_hex(8))
        with telling(self.path):
            for name in names_in(self._fd):
                if name.startswith((_WRITING, _REMOVED)):
                    self._delete(name)
            os.mkdir(writing.name, 0o700, dir_fd=self._fd)
        return writing

    def enter(self, writing: Writing) -> int:
        """Return a descriptor of the folder that a version is written into; it belongs to the caller."""
        with telling(self.path / writing.name):
            return self._enter(writing.name)

    def add_part(self, inside: int, part: Part) -> None:
        """Say what one sender wrote into the folder ``inside``; it is on the disk."""
        with telling(self.path / part.folder):
            write_whole(_part_name(part.sender), sealed(part, self._token), inside)

    def give_up(self, inside: int, sender: int) -> None:
        """Say that a sender's part will not come."""
        with suppress(OSError):
            os.close(os.open(_gone_name(sender), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=inside))

    def part(self, inside: int, writing: Writing, sender: int) -> Part | None:
        """Return what a sender wrote, or None when it is not through.

        Raises CorruptedError; PeerLostError when the sender has given up.
        """
        where = self.path / writing.name
        try:
            data = read_small(_part_name(sender), inside)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                os.stat(_gone_name(sender), dir_fd=inside, follow_symlinks=False)
                raise PeerLostError(f"trainer {sender} has given up", where=str(where)) from None
            return None
        with told_apart(where):
            part = unsealed(data, Part, self._token)
            if (part.folder, part.sender) != (writing.name, sender):
                raise CorruptedError(f"the part of trainer {part.sender} in {part.folder!r:.80} lies here")
        return part

    def publish(self, inside: int, writing: Writing, manifest: Manifest, *, keep: int) -> None:
        """Let a version appear; remove an earlier one of the same number, and all but the last ``keep``."""
        name = manifest.folder
        before = self.published()
        with telling(self.path / name):
            write_whole(MANIFEST, sealed(manifest, self._token), inside)
            for left in names_in(inside):
                if left.startswith("part-"):
                    os.unlink(left, dir_fd=inside)
            os.fsync(inside)
            os.rename(writing.name, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)
            others = [p for p in before if p.version != manifest.version]
            kept = others[len(others) - keep + 1 :] if keep <= len(others) else others
            for old in before:
                if old not in kept:
                    self._delete(old.name)

    def discard(self, writing: Writing) -> None:
        """Remove what was written of a version that will not be published."""
        if self._exists(writing.name):
            with telling(self.path / writing.name):
                self._delete(writing.name)

    def nbytes(self) -> int:
        """Return the bytes of all published versions."""
        return sum(nbytes_in(self.path / p.name) for p in self.published())

    def close(self) -> None:
        """Close it; readers that are open stay so."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, name: str) -> int:
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except NotADirectoryError as error:  # what a link is called here, too
            raise CorruptedError("it is no folder", where=str(self.path / name)) from error

    def _exists(self, name: str) -> bool:
        with telling(self.path):
            try:
                os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def _delete(self, name: str) -> None:
        """Remove a folder: for readers at once."""
        if not name.startswith((_WRITING, _REMOVED)):
            os.rename(name, _REMOVED + name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            name = _REMOVED + name
        if stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=self._fd)
        else:
            os.unlink(name, dir_fd=self._fd)


def version_name(place: int, version: int) -> str:
    """Return the name of a version's folder."""
    return f"{place:010d}-v{version}"


def _part_name(sender: int) -> str:
    return f"part-{sender}.json"


def _gone_name(sender: int) -> str:
    return f"part-{sender}.gone"
