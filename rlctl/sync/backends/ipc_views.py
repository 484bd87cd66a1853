"""Weights that a rollout worker reads where they lie, in the memory of those that sent them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError
from rlctl.sync.mapped_reader import Kept

# Seconds in which a sender's socket takes a few bytes.
_TELLING = 1.0


class Views:
    """What one worker reads in place now.

    Attributes:
        tensors: by name; read-only.
    """

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._kept: Sequence[Kept] = ()

    def take(self, tensors: Mapping[str, torch.Tensor], kept: Sequence[Kept]) -> None:
        """Read these from now on, and let go what was read before."""
        before, self.tensors, self._kept = self._kept, tensors, kept
        _tell(before)

    def let_go(self) -> None:
        """Read nothing: senders may write there again."""
        self.take({}, ())

    def bring_home(self) -> None:
        """Copy everything here, since its senders will soon know no more who reads: the tensors stay the objects that
        they are. Raises CorruptedError, and lets go, when a sender has changed its weights already."""
        kept, self._kept = self._kept, ()
        try:
            for tensor in self.tensors.values() if kept else ():
                tensor.data = tensor.clone()
            for one in kept:
                one.check()
        except BaseException:
            self.tensors = {}
            raise


def _tell(kept: Sequence[Kept]) -> None:
    for one in kept:
        with suppress(PeerLostError):  # it is gone, and needs not be told
            one.release(Deadline(_TELLING))
