"""What a tracker is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

import msgspec

from rlctl.errors import UnavailableError


class RunInfo(msgspec.Struct, frozen=True):
    """The run that a tracker follows.

    Attributes:
        project: what the run is filed under.
        name: of the run folder.
        id: the same in every attempt of one run folder, and in no other.
        folder: where the tracker may keep files; it exists.
        config: the resolved configuration, nested.
        from_step: the step that this attempt goes on from; figures of later steps belong to work that was lost.
    """

    project: str
    name: str
    id: str
    folder: str
    config: dict[str, Any]
    from_step: int = 0


class Tracker(ABC):
    """One tracker of one attempt, living in a process of its own: it may raise, hang or crash, and only it ends.

    Its package is imported in ``__init__``, not where the class is defined: the run itself never loads it.

    Args:
        run: what to follow.

    Attributes:
        packages: module -> package of what must be installed.
        notice: what a person should know once the tracker is open, or "".
    """

    packages: ClassVar[Mapping[str, str]] = {}
    notice = ""

    @abstractmethod
    def __init__(self, run: RunInfo) -> None:
        """Open whatever the figures go to."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """File the figures of one step, such as ``train/reward``, all finite or not numbers at all (NaN)."""

    def close(self, status: str) -> None:
        """Bring everything to where it belongs; ``status`` is done, failed, preempted or interrupted."""

    @classmethod
    def require(cls, name: str) -> None:
        """Raise UnavailableError, with the line that installs it, when a package is missing; imports none."""
        missing = [package for module, package in cls.packages.items() if find_spec(module) is None]
        if missing:
            raise UnavailableError(
                f"the tracker {name} needs the package {missing[0]}, which is not installed",
                where="run.trackers",
                fix=f"pip install {' '.join(missing)}, or pip install 'rlctl[trackers]'",
            )
