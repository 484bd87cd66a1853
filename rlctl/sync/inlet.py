"""How an inference process takes the weights that its checkpoint-engine worker received: from shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch

from rlctl.errors import UsageError
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.channel import connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.delta import DeltaDecoder
from rlctl.sync.digest import Verify
from rlctl.sync.protocols import LoadReport
from rlctl.sync.ring import RingConsumer
from rlctl.sync.shadow import ShadowReader
from rlctl.sync.unpacker import Unpacker
from rlctl.sync.worker import Hello


class LoadOrder(msgspec.Struct, frozen=True):
    """What an inference process is told to load.

    Attributes:
        address: of the worker.
        version: of the weights.
        base_version: that they are changes against, or None.
        verify: as the sender does.
        staged: the worker has all of it already; else it comes as it arrives.
        cast: targets may have other dtypes.
        delta: tensors may come as changes, unless it is ``staged``.
    """

    address: str
    version: int
    base_version: int | None
    verify: Verify
    staged: bool
    cast: bool
    delta: bool = False


class WeightInlet:
    """One inference process's side; kept over syncs, so that memory is mapped once.

    Args:
        token: the run's.
        peer: what errors call the worker.
    """

    def __init__(self, token: str, peer: str = "the checkpoint-engine worker") -> None:
        self._token = token.encode()
        self._peer = peer
        self._unpacker = Unpacker()
        self._ring: tuple[str, RingConsumer] | None = None
        self._shadow = ShadowReader()

    def stream(self, order: LoadOrder, deadline: Deadline) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), each checked and valid until the next is asked for. Raises TransferError.

        Raises UsageError when tensors may come as changes: only those who hold the base can take them.
        """
        if order.delta and not order.staged:
            raise UsageError(
                "an engine that loads weights by itself takes no deltas in place",
                fix="commit=staged, where the worker makes whole tensors of them; or no delta",
            )
        with self._buckets(order, deadline) as buckets:
            yield from self._unpacker.tensors(buckets)

    def into(self, order: LoadOrder, targets: Mapping[str, torch.Tensor], deadline: Deadline) -> LoadReport:
        """Write what comes into ``targets``, each byte once, from shared memory into its tensor."""
        with self._buckets(order, deadline) as buckets:
            if order.delta and order.base_version is not None:
                decoder = DeltaDecoder(targets, version=order.version, check_bytes=order.verify == "full")
                return decoder.load(self._unpacker.tensors(buckets))
            return self._unpacker.into(buckets, targets, cast=order.cast)

    def close(self) -> None:
        """Unmap everything."""
        self._close_ring()
        self._shadow.close()

    @contextmanager
    def _buckets(self, order: LoadOrder, deadline: Deadline) -> Iterator[Iterator[FilledBucket]]:
        self._unpacker.begin(version=order.version, base_version=order.base_version, verify=order.verify)
        if order.staged:
            with connect(order.address, self._token, self._peer, deadline) as channel:
                channel.send(msgspec.msgpack.encode(Hello("shadow", self._shadow.shadow, self._shadow.known)), deadline)
                yield self._shadow.buckets(channel, deadline)
            return
        try:
            if self._ring is None or self._ring[0] != order.address or not self._ring[1].connected:
                self._close_ring()
                channel = connect(order.address, self._token, self._peer, deadline)
                channel.send(msgspec.msgpack.encode(Hello("ring")), deadline)
                self._ring = order.address, RingConsumer(channel, deadline)
        except BaseException:
            self._close_ring()
            raise
        ring = self._ring
        try:
            yield ring[1].buckets(deadline)
        except BaseException:
            if self._ring is ring:  # a stream that was left in the middle may be closed during a later one
                self._close_ring()  # the worker does the same: both start anew
            raise

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None
