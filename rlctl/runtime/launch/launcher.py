"""What starts the processes of a run at their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rlctl.process import Start

PlaceKind = Literal["trainer", "replica", "hybrid", "reward"]


@dataclass(frozen=True)
class Place:
    """Where a process goes: the devices of a trainer rank, or of all ranks of a replica, by its number."""

    kind: PlaceKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


class Launcher(Protocol):
    """Starts processes, and ends all that it started."""

    def starter(self, place: Place) -> Start:
        """Return what starts every process of a place: a replica's and its checkpoint-engine worker's, say. Such a
        process sees the devices of its place and no others, in the order of the place's ranks."""

    def address(self) -> str | None:
        """Return the address of the Ray cluster; None for plain processes."""

    def one_machine(self) -> bool:
        """Whether all places are on this machine, so that files, shared memory and loopback reach all of them."""

    def here(self) -> str:
        """Return the address of this machine that all places reach."""

    def close(self) -> None:
        """End everything that it started. Harmless when repeated."""
