"""A switch in which only changed elements travel: messages are compared with what they were the last time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rlctl.hybrid.reshard.idle_memory import IdleMemory
from rlctl.hybrid.reshard.memory import Slot, block
from rlctl.hybrid.reshard.pieces import Message, Piece
from rlctl.hybrid.reshard.schedule import Schedule, messages_of
from rlctl.hybrid.reshard.switching import Run, parts_of, shard_of
from rlctl.hybrid.reshard.watch import Watch
from rlctl.hybrid.reshard.wire import Parcel, Wire
from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.boxes import slices
from rlctl.sync.cutting import aligned
from rlctl.sync.delta import SMALLEST, apply_checked
from rlctl.sync.delta_codec import DENSE_ABOVE, encode, few_changes
from rlctl.sync.digest import Bytes, content_digest
from rlctl.sync.tensor_meta import TensorMeta


class SentBase:
    """A rank's training shards as it last sent them, in the dtype that travels; only those that others lack."""

    def __init__(self, plan: Schedule, idle: IdleMemory) -> None:
        self._idle = idle
        pieces = (piece for message in messages_of(plan.sends) for piece in message.pieces)
        self._dtypes = {piece.src: torch_dtype(piece.dtype) for piece in pieces}
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def renew(self, held: Mapping[str, torch.Tensor]) -> None:
        """Take what was just sent."""
        for name, dtype in self._dtypes.items():
            if name not in self.tensors:
                source = held[name]
                memory = block(source.numel() * dtype.itemsize, source.device, self._idle)
                self.tensors[name] = memory.view(dtype).view(source.shape)
            self.tensors[name].copy_(held[name].detach())


class KeptRun(Run):
    """A first switch, whose generation shards are kept while training: none is a training shard, which changes."""

    def _is_all(self, piece: Piece) -> bool:
        del piece
        return False


class DeltaRun(Run):
    """One switch against the ones before; a message that changed much goes whole.

    Args:
        plan, held, wire, watch, idle: see ``Run``.
        base: what this rank sent the last time.
        old: generation shards of the last time, which become those of this one.
    """

    def __init__(
        self,
        plan: Schedule,
        held: Mapping[str, torch.Tensor],
        wire: Wire,
        watch: Watch,
        idle: IdleMemory,
        base: SentBase,
        old: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(plan, held, wire, watch, idle)
        self._base = base
        self._old = old

    def _take_memory(self, into: Mapping[str, torch.Tensor] | None, device: torch.device) -> None:
        super()._take_memory(self._old if into is None else into, device)

    def _exchange(self, device: torch.device) -> None:
        self._copy()
        rounds = [self._schedule.round(number) for number in range(self._schedule.rounds)]
        # Room for each message as it is, and as it was or comes in.
        most = max((sum(2 * aligned(m.nbytes) for m in (*s, *r)) for s, r in rounds), default=0)
        slot = Slot(most, device, self._idle)
        self._extra += slot.nbytes
        base_extra = self._extra
        for sends, receives in rounds:
            slot.clear()
            with self._phase("cut"):
                leaving = [self._changes(message, slot) for message in sends]
                parcels = [Parcel(m.src, m.dst, data) for m, data in zip(sends, leaving, strict=True)]
                sizes = [Parcel(p.src, p.dst, _size(p.data.numel(), device)) for p in parcels]
                coming = [Parcel(m.src, m.dst, _size(0, device)) for m in receives]
            with self._phase("wire", waits=True):
                self._wire.wait(self._wire.post([*sizes, *coming], control=True))
            self._extra = max(self._extra, base_extra + sum(data.nbytes for data in leaving))
            arriving = [slot.take(int(parcel.data.view(torch.int64))) for parcel in coming]
            parcels += [Parcel(m.src, m.dst, data) for m, data in zip(receives, arriving, strict=True)]
            with self._phase("wire", waits=True):
                self._wire.wait(self._wire.post(parcels))
            with self._phase("place"):
                for message, data in zip(receives, arriving, strict=True):
                    self._apply(message, data, slot)

    def _changes(self, message: Message, slot: Slot) -> torch.Tensor:
        """Return what to send for a message: a delta if that is smaller, the message itself if not."""
        new, old = slot.take(message.nbytes), slot.take(message.nbytes)
        for piece, part in parts_of(message.pieces, new):
            part.copy_(self._source(piece))
        if message.nbytes < SMALLEST:
            return new
        for piece, part in parts_of(message.pieces, old):
            shape = tuple(high for _, high in piece.src_box)
            part.copy_(shard_of(self._base.tensors, piece.src, shape, "sent before")[slices(piece.src_box)])
        meta = _meta(message)
        before, after = _array(old), _array(new)
        change = few_changes(before, after, meta.dtype, DENSE_ABOVE)
        if change is None:
            return new
        payload = encode(change, meta.dtype, meta.shape, content_digest(before))
        if payload.nbytes >= message.nbytes:
            return new
        return torch.from_numpy(payload).to(new.device)

    def _apply(self, message: Message, data: torch.Tensor, slot: Slot) -> None:
        if data.numel() != message.nbytes:
            whole = slot.take(message.nbytes)
            for piece, part in parts_of(message.pieces, whole):
                part.copy_(self._target(piece))
            changed = _array(whole)
            apply_checked(_array(data), _meta(message), changed)
            data = whole if whole.device.type == "cpu" else torch.from_numpy(changed).to(whole.device)
        self._place(message, data)


def _size(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([nbytes], dtype=torch.int64, device=device).view(torch.uint8)


def _meta(message: Message) -> TensorMeta:
    """Describe a message as one tensor: of the dtype of its pieces, or of bytes where they are of several."""
    dtypes = {piece.dtype for piece in message.pieces}
    dtype = dtypes.pop() if len(dtypes) == 1 else "U8"
    name = f"rank {message.src} to rank {message.dst}"
    return TensorMeta(name, dtype, (message.nbytes // torch_dtype(dtype).itemsize,))


def _array(tensor: torch.Tensor) -> Bytes:
    found: Bytes = np.ascontiguousarray(tensor.cpu().numpy())
    return found
