"""Taking weights out of a folder of versions outside of any sync: replicas pull when they like.

For a replica that joins late, an evaluation beside a run, or another cluster on the same file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch

from rlctl.sync.errors import TransferError, WrongBaseError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.version_folder import VersionFolder
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
        foreign: ForeignError | None = None
        for published in reversed(self._folder.published()):
            if version not in (None, published.version):
                continue
            try:
                reader = self._folder.open(published.name)
            except FileNotFoundError:  # removed since: a later one is there, or it is too late
                continue
            except ForeignError as error:
                foreign = error
                continue
            base = reader.manifest.base_version
            if base is None:
                return reader
            reader.close()
            if version is not None:
                raise WrongBaseError(f"version {version} is there only as changes against version {base}")
        if foreign is not None:
            raise foreign
        wanted = "no version is" if version is None else f"version {version} is not"
        raise TransferError(
            f"{wanted} there", where=str(self._folder.path), fix=f"there are: {self.versions() or 'none'}"
        )

    def pull(self, targets: Mapping[str, torch.Tensor], version: int | None = None, *, cast: bool = False) -> Pulled:
        """Read a version into ``targets`` (name -> tensor), in place; see ``open`` and ``VersionReader.into``. After
        an error they may be a mix: pull into a copy where that matters."""
        with self.open(version) as reader:
            return Pulled(reader.version, reader.into(targets, cast=cast))

    def close(self) -> None:
        """Close the folder."""
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
