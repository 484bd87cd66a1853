"""Weights over torch.distributed's gloo: plain TCP between CPUs."""

from __future__ import annotations

import torch.distributed

from rlctl.errors import UnavailableError
from rlctl.sync.backends.collective import CollectiveEngine
from rlctl.sync.backends.gloo_group import GlooGroup
from rlctl.sync.rendezvous import MeetingStore


class GlooEngine(CollectiveEngine):
    """See the module."""

    name = "gloo"
    places = True

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            raise UnavailableError("this build of torch has no gloo", fix="pip install torch")

    def _open_group(self, store: MeetingStore, rank: int, peers: list[str]) -> GlooGroup:
        return GlooGroup(store, rank, peers, self.options.host, self.deadline)
