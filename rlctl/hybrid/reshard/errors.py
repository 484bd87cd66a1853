"""What can go wrong while weights change their layout."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.sync.errors import TransferError


class ReshardError(TransferError):
    """A switch that did not end: a rank is dead or stuck.

    Attributes:
        ranks: rank of the group -> the phase it was in.
        phase: in which this rank waited for them.
    """

    def __init__(self, message: str, *, ranks: Mapping[int, str], phase: str) -> None:
        super().__init__(message, fix="its log says why; the group cannot be used again, start it anew")
        self.ranks = dict(ranks)
        self.phase = phase
