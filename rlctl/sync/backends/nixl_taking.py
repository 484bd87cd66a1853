"""One bucket on its way from its source's memory into this process's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlctl.sync.backends.nixl_agent import Place
from rlctl.sync.backends.nixl_links import READ, Announcement, Outlet, Source, Waiting, decoded
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError
from rlctl.sync.runs import memory_of, runs
from rlctl.sync.tensor_meta import BucketMeta

Placed = Callable[[BucketMeta], Mapping[int, torch.Tensor]]


class Taking:
    """A bucket to be received, as work. It begins to be read at once when it is known already where it lies.

    Args:
        source: where it comes from.
        buffer: for what is not read right into its place.
        placed: says which chunks are.
        waiting: how to wait.
        outlet: those that read it from here, once it is here.
    """

    def __init__(
        self,
        source: Source,
        buffer: torch.Tensor,
        placed: Placed,
        waiting: Waiting,
        deadline: Deadline,
        outlet: Outlet | None,
    ) -> None:
        self._source = source
        self._buffer = buffer
        self._placed = placed
        self._waiting = waiting
        self._outlet = outlet
        self._told: Announcement | None = None
        self.forwarded = 0  # buckets of the outlet, when this one was announced
        if waiting.ready([source.channel], 0):
            self._begin(deadline)

    def wait(self, deadline: Deadline) -> BucketMeta:
        """See Work."""
        channel = self._source.channel
        if self._told is None:
            self._waiting.readable([channel], f"waiting for a bucket from {channel.peer}")
            self._begin(deadline)
        assert self._told is not None
        self._waiting.finish(self._source, self._readings)
        if self._outlet is not None:
            self.forwarded = self._outlet.announce(self._waiting.agent, self._told.bucket, self._here, deadline)
        channel.send(READ, deadline)
        return self._meta

    def _begin(self, deadline: Deadline) -> None:
        peer = self._source.channel.peer
        told = decoded(self._source.channel.receive(deadline), Announcement, peer)
        if told.metadata:
            self._waiting.agent.meet(told.metadata, peer)
        meta = BucketMeta.decode(told.bucket)
        if meta.used > self._buffer.numel():
            raise CorruptedError(f"a bucket of {meta.used} bytes was announced")
        placed = self._placed(meta)
        here = [Place.of(memory_of(run, self._buffer, placed)) for run in runs(meta)]
        if [place.nbytes for place in here] != [place.nbytes for place in told.places]:
            raise CorruptedError(f"bucket {meta.index} does not lie where {peer} says it does")
        self._told, self._meta, self._here = told, meta, here
        self._readings = self._waiting.start(self._source, list(zip(here, told.places, strict=True)))
