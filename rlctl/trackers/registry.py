"""Trackers by name."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.errors import UnavailableError
from rlctl.registry import Registry
from rlctl.trackers.base import Tracker

TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    {
        "tensorboard": "rlctl.trackers.tensorboard:TensorBoardTracker",
        "wandb": "rlctl.trackers.wandb:WandbTracker",
        "trackio": "rlctl.trackers.trackio:TrackioTracker",
    },
    group="rlctl.trackers",
    base="rlctl.trackers.base:Tracker",
)


def require_trackers(names: Sequence[str]) -> dict[str, str]:
    """Return name -> ``module:Class`` of the trackers asked for, each with its packages installed.

    Raises:
        UsageError: no tracker of that name.
        UnavailableError: a package is missing.
    """
    found = {}
    for name in names:
        try:
            cls = TRACKERS.load(name, where="run.trackers")
        except ImportError as error:
            raise UnavailableError(f"the tracker {name} cannot be imported: {error}", where="run.trackers") from error
        cls.require(name)
        found[name] = f"{cls.__module__}:{cls.__qualname__}"
    return found
