"""How syncs are done."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.errors import UsageError
from rlctl.sync.protocols import Interruption
from rlctl.sync.states import Commit


@dataclass(frozen=True)
class SyncPolicy:
    """How syncs are done.

    Attributes:
        timeout: seconds for a whole sync.
        commit: ``inplace`` writes into the live weights: a replica whose transfer fails is fenced, until the next
            sync fills it. ``staged`` fills a shadow copy first and swaps when all are whole: after a failure the old
            version goes on serving; it costs one model of memory a replica.
        interruption: what becomes of running requests.
        pause_timeout: seconds that replicas have to stop serving; None: a quarter of ``timeout``.
        delta: tensors may go as changes against the version that all replicas serve; the engines' options must say so,
            too. Not with ``cast``: changes of bits need the same bits to change.
        partial: the stream may leave tensors of the engines untouched.
        cast: engines may hold other dtypes than those that are sent.
        attempts: transfers in one sync, while the deadline lasts; the later ones for replicas that lost theirs
            through another's fault.
    """

    timeout: float = 300.0
    commit: Commit = "inplace"
    interruption: Interruption = "abort"
    pause_timeout: float | None = None
    delta: bool = False
    partial: bool = False
    cast: bool = False
    attempts: int = 2

    def __post_init__(self) -> None:
        if self.delta and self.cast:
            raise UsageError(
                "deltas change bits, so they cannot be cast on arrival",
                fix="cast the weights where they are sent, or send them whole (delta off)",
            )
