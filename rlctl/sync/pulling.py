"""Taking weights out of a folder of versions outside of any sync: replicas pull when they like.

For a replica that joins late, an evaluation beside a run, or another cluster on the same file system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import torch

from rlctl.sync.delta import DeltaDecoder
from rlctl.sync.errors import TransferError, WrongBaseError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.version_folder import Published, VersionFolder
from rlctl.sync.version_manifest import ForeignError
from rlctl.sync.version_reader import VersionReader


class Pulled(NamedTuple):
    """What was pulled: the version and the names."""

    version: int
    report: LoadReport


class Puller:
    """Reads versions that backend ``file`` has published.

    Args:
        folder: the ``folder`` of the backend's options.
        token: the run's secret.

    Raises:
        TransferError: the folder is not there, or others may write into it.
    """

    def __init__(self, folder: Path | str, token: str) -> None:
        self._folder = VersionFolder(Path(folder), token)

    def versions(self) -> list[int]:
        """Return the numbers of the versions that are there, the one published last at the end."""
        return [p.version for p in self._folder.published()]

    def open(self, version: int | None = None) -> VersionReader:
        """Open a version, by default the one published last that is whole and not a set of changes; what another run
        wrote is passed by. It can be read to the end even if it is removed meanwhile.

        Raises:
            TransferError: there is none.
            WrongBaseError: the version asked for holds changes only.
            CorruptedError: its files are damaged.
        """
        with ExitStack() as files:
            (reader,) = self._find(version, files, chain=False)
            files.pop_all()
            return reader

    def pull(self, targets: Mapping[str, torch.Tensor], version: int | None = None, *, cast: bool = False) -> Pulled:
        """Read a version into ``targets`` (name -> tensor), in place; see ``open`` and ``VersionReader.into``. Of one
        that is there as changes, first the whole one that it goes back to, then all changes since. After an error they
        may be a mix: pull into a copy where that matters."""
        with ExitStack() as files:
            whole, *changed = self._find(version, files, chain=True)
            report = whole.into(targets, cast=cast)
            for reader in changed:
                check = reader.manifest.verify == "full"
                report = DeltaDecoder(targets, version=reader.version, check_bytes=check).load(reader.tensors())
            return Pulled([whole, *changed][-1].version, report)

    def _find(self, version: int | None, files: ExitStack, *, chain: bool) -> list[VersionReader]:
        """Open what ``open`` or ``pull`` reads: one whole version, and with ``chain`` the changes after it."""
        problem: TransferError | None = None
        there = self._folder.published()
        for number in reversed(range(len(there))):
            if version not in (None, there[number].version):
                continue
            with ExitStack() as mine:
                try:
                    readers = self._back_to_whole(there[: number + 1], mine, chain=chain)
                except FileNotFoundError:  # removed since: a later one is there, or it is too late
                    continue
                except (ForeignError, WrongBaseError) as error:
                    if problem is None or version is not None or isinstance(error, ForeignError):
                        problem = error
                    continue
                files.push(mine.pop_all())
                return readers
        if problem is not None:
            raise problem
        wanted = "no version is" if version is None else f"version {version} is not"
        raise TransferError(
            f"{wanted} there", where=str(self._folder.path), fix=f"there are: {self.versions() or 'none'}"
        )

    def _back_to_whole(self, there: Sequence[Published], files: ExitStack, *, chain: bool) -> list[VersionReader]:
        """Open the last of these versions, and before it those whose changes lead to it."""
        *before, last = there
        reader = files.enter_context(self._folder.open(last.name))
        if not reader.manifest.changes:
            return [reader]
        base = reader.manifest.base_version
        earlier = [number for number, one in enumerate(before) if one.version == base]
        if not chain or not earlier:
            missing = ", which is gone" if chain else ""
            raise WrongBaseError(f"version {last.version} is there only as changes against version {base}{missing}")
        return [*self._back_to_whole(before[: earlier[-1] + 1], files, chain=chain), reader]

    def close(self) -> None:
        """Close the folder."""
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
