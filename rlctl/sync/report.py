"""What a sync tells: its report, its events, and the error of one that brought no replica to its version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.errors import RlctlError
from rlctl.sync.states import Ending
from rlctl.sync.traits import Delivery

PhaseListener = Callable[[str, float, str], None]


@dataclass
class SyncReport:
    """A sync that has ended.

    Attributes:
        version: the version that was to be brought.
        tensors: tensors of one replica; where slices are delivered, slices of one rank.
        bytes: bytes that left the trainers; in one process, bytes handed to all replicas together.
        seconds: wall time of the whole sync.
        phases: seconds by state.
        ending: how it ended.
        committed: replicas that serve ``version``.
        kept: replicas that serve the version they had.
        fenced: replica -> why it is out of routing, those fenced before this sync included.
        stall: the longest time that a replica which serves again did not.
        extra_nbytes: most memory that one member holds for syncs beside the weights: buckets, bases, a shadow copy.
        attempts: transfers made; above 1 when replicas that lost theirs through others' fault got it again.
        delivery: what workers got: ``slices`` of their ranks, or ``whole`` tensors; see ``delivery.planned``.
        kept_nbytes: what the fullest device keeps of it while it trains, for the next one: with deltas in place.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
    phases: dict[str, float]
    ending: Ending = Ending.COMMITTED
    committed: Sequence[str] = ()
    kept: Sequence[str] = ()
    fenced: Mapping[str, str] = field(default_factory=dict)
    stall: float = 0.0
    extra_nbytes: int = 0
    attempts: int = 1
    delivery: Delivery = "whole"
    kept_nbytes: int = 0


class SyncError(RlctlError):
    """A weight sync that brought no replica to its version; ``fenced`` names the replicas that must not serve."""

    def __init__(
        self, message: str, *, fenced: Sequence[str], fix: str | None = None, report: SyncReport | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.fenced = list(fenced)
        self.report = report


@dataclass(frozen=True)
class SyncEvent:
    """Something that happened in a sync.

    Attributes:
        kind: ``state`` (one was left after ``seconds``, with ``detail`` when it failed), ``retry`` (``detail``: for
            whom and why), ``fenced`` (``replica``, ``detail``: why) or ``ended`` (``detail``: the Ending).
    """

    kind: str
    version: int
    state: str = ""
    seconds: float = 0.0
    replica: str = ""
    detail: str = ""
