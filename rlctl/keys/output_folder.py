"""A folder that appears whole or not at all: written beside its place under another name, then renamed."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rlctl.errors import RlctlError, UsageError
from rlctl.keys.interruption import signals_deferred, signals_raise
from rlctl.keys.owner_token import new_token, owner_is_dead
from rlctl.units import format_bytes

_NEW, _OLD = "rlctl-new", "rlctl-old"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# A folder that --overwrite may delete holds one of these at its top.
_CHECKPOINT_SIGNS = (
    "config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin",
    ".metadata", "metadata.json", "common.pt", "latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*",
)  # fmt: skip


class OutputError(RlctlError):
    """The output could not be written; nothing was left behind."""


class OutputFolder:
    """Context manager around the writing of folder ``target``.

    Inside the block ``path`` is a hidden sibling folder to write into. When the block ends well, everything in it is
    flushed to the disk and it is renamed to ``target``; when it ends by any exception, Ctrl-C or SIGTERM, it is
    removed and ``target`` is as it was. Leftovers of killed runs beside the target are removed at the start, and a
    target that such a run had moved aside is put back.

    Args:
        target: the folder to make.
        overwrite: replace an existing ``target``. Only a folder that looks like a checkpoint is ever replaced.
        sources: folders or files that are read meanwhile; the target must not be one of them, lie in one, or hold one.
        expected_bytes: when given, too little free space is an error before anything is written.
        durable: wait until the disk has everything before the rename.

    Raises UsageError for a target that exists or may not be replaced, OutputError when the disk is full or refuses.
    """

    def __init__(
        self,
        target: Path | str,
        *,
        overwrite: bool = False,
        sources: Sequence[Path | str] = (),
        expected_bytes: int = 0,
        durable: bool = True,
    ) -> None:
        self.target = Path(os.path.abspath(target))  # noqa: PTH100 - resolve() would follow a link that is the target
        self.path = self.target.parent / f".{self.target.name}.{_NEW}.{new_token()}"
        self._overwrite = overwrite
        self._sources = [Path(s) for s in sources]
        self._expected_bytes = expected_bytes
        self._durable = durable
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        self._check_sources()
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.target)
            self._check_target()
            self._check_space(parent)
            self._signals.enter_context(signals_raise())
            self.path.mkdir()
        except BaseException as error:
            self._discard()
            self._signals.close()
            if isinstance(error, OSError):
                raise self._output_error(error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals:
            try:
                if error is None:
                    self._flush()
                    with signals_deferred():
                        self._put_in_place()
            except OSError as failure:
                self._discard()
                raise self._output_error(failure) from failure
            except BaseException:
                self._discard()
                raise
            if error is not None:
                self._discard()
                if isinstance(error, OSError):
                    raise self._output_error(error) from error

    def _check_sources(self) -> None:
        target = self.target.resolve()
        for source in self._sources:
            real = source.resolve()
            if target == real or target.is_relative_to(real) or real.is_relative_to(target):
                raise UsageError(
                    f"the output would lie in, hold or replace its own source {source}",
                    where=str(self.target),
                    fix="choose another folder",
                )

    def _check_target(self) -> None:
        target = self.target
        if not (target.exists() or target.is_symlink()):
            return
        if target.is_symlink() or not target.is_dir():
            raise UsageError("exists and is no folder", where=str(target), fix="choose another name")
        if not any(target.iterdir()):
            return
        if not self._overwrite:
            raise UsageError("exists already", where=str(target), fix="choose another folder, or allow --overwrite")
        if (target / ".git").exists() or not any(any(target.glob(sign)) for sign in _CHECKPOINT_SIGNS):
            raise UsageError(
                "will not be overwritten: it does not look like a checkpoint",
                where=str(target),
                fix="remove it yourself",
            )

    def _check_space(self, parent: Path) -> None:
        free = shutil.disk_usage(parent).free
        if self._expected_bytes > free:
            raise OutputError(
                f"{format_bytes(self._expected_bytes)} are needed and {format_bytes(free)} are free",
                where=str(self.target),
                fix="free some space or choose another disk",
            )

    def _flush(self) -> None:
        if not self._durable:
            return
        for folder, _, files in os.walk(self.path):
            for name in files:
                _fsync(Path(folder) / name)
            _fsync(Path(folder))

    def _put_in_place(self) -> None:
        if not self.target.is_dir() or not any(self.target.iterdir()):
            self.path.rename(self.target)  # rename(2) replaces an empty folder
        else:
            old = self.target.parent / f".{self.target.name}.{_OLD}.{new_token()}"
            if _exchange(self.path, self.target):
                self.path.rename(old)
            else:
                self.target.rename(old)
                try:
                    self.path.rename(self.target)
                except OSError:
                    old.rename(self.target)
                    raise
            shutil.rmtree(old, ignore_errors=True)  # the new folder is in place; a later run removes what stays
        if self._durable:
            _fsync(self.target.parent)

    def _discard(self) -> None:
        with signals_deferred():
            shutil.rmtree(self.path, ignore_errors=True)

    def _output_error(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f" ({format_bytes(self._expected_bytes)} are needed)" if self._expected_bytes else ""
            return OutputError(f"the disk is full{need}", where=str(self.target), fix="free some space and run again")
        if error.errno == errno.EFBIG:
            return OutputError(
                "a file grew past the limit on file sizes",
                where=str(self.target),
                fix="raise ulimit -f, or use smaller shards",
            )
        name = f" ({error.filename})" if error.filename else ""
        return OutputError(f"cannot write: {error.strerror}{name}", where=str(self.target))


def remove_leftovers(target: Path) -> None:
    """Remove what killed runs left beside ``target``, and put back a target that one had moved aside."""
    for folder in target.parent.glob(f".{_escaped(target.name)}.{_OLD}.*"):
        if owner_is_dead(folder.name.partition(f".{_OLD}.")[2]):
            if target.exists():
                shutil.rmtree(folder)
            else:
                folder.rename(target)
    for folder in target.parent.glob(f".{_escaped(target.name)}.{_NEW}.*"):
        if owner_is_dead(folder.name.partition(f".{_NEW}.")[2]):
            shutil.rmtree(folder)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux renameat2); False where system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
