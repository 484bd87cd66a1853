"""Checkpoints: anything with ``state()`` and ``load()``, under a name, published by one rename, without pickle.

A checkpoint is a folder ``step_N`` with ``tensors.safetensors`` and ``state.json``; the latter holds the plain values,
a reference in place of each tensor, and the SHA-256 of the tensor file. ``SHA256SUMS`` has that of ``state.json``, as
``sha256sum -c`` takes it; a checkpoint of format 1 lacks it. A folder that has its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlctl.errors import RlctlError
from rlctl.runtime.atomic import fsync_folder
from rlctl.runtime.checkpoint_names import checkpoint_steps

FORMAT = 2
_SUMS = "SHA256SUMS"
_REFERENCE = "$tensor"


class Stateful(Protocol):
    """A part of a run that survives its process."""

    def state(self) -> Mapping[str, Any]:
        """Return everything that must survive: nested dicts and lists of plain values and tensors."""

    def load(self, state: Any) -> None:
        """Become what ``state()`` described."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they live.
        keep: how many stay.

    Attributes:
        needed: given the steps that have one, returns those that stay beside the last ``keep``.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self.needed: Callable[[Sequence[int]], Collection[int]] = lambda _: ()

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first."""
        return checkpoint_steps(self._folder)

    def path(self, step: int) -> Path:
        """Return the folder of one checkpoint."""
        return self._folder / f"step_{step}"

    def save(self, step: int, parts: Mapping[str, Stateful]) -> Path:
        """Publish the state of ``parts`` as the checkpoint of ``step`` and prune old ones.

        Raises:
            RlctlError: the disk is full or read-only; nothing half-written is left and older checkpoints stay.
        """
        target = self.path(step)
        temporary = self._folder / f".step_{step}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.clean()
            temporary.mkdir()
            _write(temporary, step, {name: part.state() for name, part in parts.items()})
            if target.exists():
                self._discard(target)
            temporary.rename(target)
            fsync_folder(self._folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RlctlError(
                f"checkpoint of step {step} could not be written: {reason}",
                where=str(self._folder),
                fix="free space and continue with --resume auto"
                + (f": the checkpoint of step {self.steps()[-1]} is whole" if self.steps() else ""),
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        steps = self.steps()
        needed = self.needed(steps)
        for old in steps[: -self._keep]:
            if old not in needed:
                self._discard(self.path(old))
        return target

    def tensors_sha256(self, step: int) -> str:
        """Return the SHA-256 of a checkpoint's tensors, as it states it. Raises RlctlError."""
        file = self.path(step) / "state.json"
        try:
            return str(json.loads(file.read_text())["tensors_sha256"])
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise RlctlError(f"not a checkpoint that can be read: {error}", where=str(file)) from error

    def clean(self) -> None:
        """Remove what a killed process left half-written or half-deleted."""
        if self._folder.is_dir():
            for leftover in self._folder.glob(".step_*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _discard(self, folder: Path) -> None:
        # Renamed before it is deleted: a kill in between must not leave a checkpoint with files missing.
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write(folder: Path, step: int, states: Mapping[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = {name: _detach(state, name, tensors) for name, state in states.items()}
    save_file(tensors, folder / "tensors.safetensors", metadata={"format": "pt"})
    document = {
        "format": FORMAT,
        "step": step,
        "tensors_sha256": _sha256(folder / "tensors.safetensors"),
        "parts": plain,
    }
    (folder / "state.json").write_text(json.dumps(document))
    (folder / _SUMS).write_text(_sums(folder))
    for name in ("tensors.safetensors", "state.json", _SUMS):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)


def read_checkpoint(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return (step, part name -> state) of a checkpoint folder.

    Raises:
        RlctlError: not a checkpoint, another format, or its bytes changed since it was written.
    """
    try:
        for name in ("state.json", "tensors.safetensors"):
            if not (folder / name).is_file():  # a pipe or a device would be waited on, or never end
                raise RlctlError(f"not a checkpoint that can be read: {name} is no file", where=str(folder))
        document = json.loads((folder / "state.json").read_text())
        if document["format"] not in (1, FORMAT):
            raise RlctlError(f"checkpoint format {document['format']}, this rlctl reads {FORMAT}", where=str(folder))
        if document["format"] == FORMAT and not _sums_hold(folder):
            raise RlctlError("the values of this checkpoint changed since it was written", where=str(folder))
        if _sha256(folder / "tensors.safetensors") != document["tensors_sha256"]:
            raise RlctlError("the tensors of this checkpoint changed since it was written", where=str(folder))
        tensors = load_file(folder / "tensors.safetensors")
        return int(document["step"]), {name: _attach(state, tensors) for name, state in document["parts"].items()}
    except (OSError, KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RecursionError,
            SafetensorError) as error:  # fmt: skip
        raise RlctlError(f"not a checkpoint that can be read: {error}", where=str(folder)) from error


def _detach(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {_REFERENCE: path}
    if isinstance(value, Mapping):
        return {key: _detach(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_detach(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    return value


def _attach(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_REFERENCE}:
            return tensors[value[_REFERENCE]]
        return {key: _attach(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_attach(item, tensors) for item in value]
    return value


def _sums_hold(folder: Path) -> bool:
    sums = folder / _SUMS
    return sums.is_file() and sums.read_text() == _sums(folder)


def _sums(folder: Path) -> str:
    return f"{_sha256(folder / 'state.json')}  state.json\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
