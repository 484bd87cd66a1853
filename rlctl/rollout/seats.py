"""What a pool knows of each replica: whether it serves, was fenced, leaves, or is gone, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.rollout.client import ReplicaClient

SeatState = Literal["new", "serving", "fenced", "leaving", "lost"]
Change = Literal["joined", "serving", "fenced", "left", "lost"]


@dataclass(frozen=True)
class ReplicaChange:
    """A replica came, went, or changed between serving and not.

    Attributes:
        replica: its name.
        change: ``joined`` (it gets requests once it serves), ``serving``, ``fenced``, ``left`` or ``lost``.
        why: in words, where there is something to say.
        moved: requests that go on elsewhere.
    """

    replica: str
    change: Change
    why: str = ""
    moved: int = 0


@dataclass
class Seat:
    """One stay of a replica in a pool.

    Attributes:
        client: the replica.
        epoch: of its leases.
        state: ``new`` until it serves for the first time.
        why: of ``fenced`` and ``lost``.
        died: it is not at work any more, and once it serves again, it was restarted.
        unended: it was fenced, and what it had has not been aborted.
    """

    client: ReplicaClient
    epoch: int
    state: SeatState = "new"
    why: str = "its weights have not come yet"
    died: bool = False
    unended: bool = False

    @property
    def name(self) -> str:
        """The replica's name."""
        return self.client.replica

    def look(self) -> Literal["serving", "fenced"] | None:
        """Ask the replica whether it serves; return the new state where that is another one."""
        serves = self.client.serving is not None
        if self.state in ("new", "fenced") and serves:
            self.state, self.why, self.unended = "serving", "", False
            return "serving"
        if self.state == "serving" and not serves and not self.client.lost:
            self.state, self.why, self.unended = "fenced", "it was fenced: it is not known to hold whole weights", True
            return "fenced"
        return None

    @property
    def back(self) -> bool:
        """Whether it was lost and serves again."""
        return self.state == "lost" and self.died and not self.client.lost and self.client.serving is not None

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state == "serving" and not self.client.lost
