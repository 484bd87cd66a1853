"""Moving the parts of a plan between the devices that both train and generate: one batch of point-to-point messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.keys.dtypes import torch_dtype
from rlctl.sync.boxes import sizes, slices
from rlctl.sync.errors import DeadlineError, PeerLostError
from rlctl.sync.plan import Plan, Transfer


@dataclass
class Exchanged:
    """What one rank has after an exchange.

    Attributes:
        shards: by the rollout layout's local names; empty for a rank that does not generate.
        sent, received: bytes by the other rank.
        seconds: by phase.
        placed: parts that were placed here.
        extra_bytes: most memory taken beside the shards.
    """

    shards: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    placed: int = 0
    extra_bytes: int = 0


class Exchange:
    """One rank's part in carrying a plan out; all ranks make the same calls.

    Args:
        plan: of devices that are numbered as the trainer's ranks are.
        rank: this one.
        group: of all ranks; None when this one is alone.
        deadline: seconds for one exchange.
        device: where shards are made.
    """

    def __init__(
        self, plan: Plan, rank: int, group: dist.ProcessGroup | None, *, deadline: float, device: str = "cpu"
    ) -> None:
        places = {device: number for number, device in enumerate(plan.placement.rollout)}
        self._group, self._deadline, self._device = group, deadline, device
        self.part = places.get(plan.placement.train[rank], -1)
        self._rank_of = {part: plan.placement.train.index(device) for part, device in enumerate(plan.placement.rollout)}
        self.outgoing: list[Transfer] = list(plan.transfers(src=rank))
        self.incoming: list[Transfer] = list(plan.transfers(dst=self.part)) if self.part >= 0 else []
        self.shapes = _local_shapes(plan, self.part) if self.part >= 0 else {}
        self._rank = rank

    def run(self, held: Mapping[str, Tensor]) -> Exchanged:
        """Make this rank's generation shards out of what all ranks hold.

        Args:
            held: this rank's training shards, in the dtype that is generated with.

        Raises:
            DeadlineError: another rank did not take part in time.
            PeerLostError: one is gone.
        """
        found, begin = Exchanged(), time.perf_counter()
        found.shards = {
            name: torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
            for name, (shape, dtype) in self.shapes.items()
        }
        parcels = {
            other: torch.cat([_bytes(held[t.src_tensor][slices(t.src_box)]) for t in transfers])
            for other, transfers in self._by_rank(self.outgoing, sending=True).items()
        }
        expected = self._by_rank(self.incoming, sending=False)
        landing = {
            other: torch.empty(sum(t.nbytes for t in transfers), dtype=torch.uint8, device=self._device)
            for other, transfers in expected.items()
        }
        found.seconds["cut"] = time.perf_counter() - begin
        self._carry(parcels, landing)
        found.seconds["wire"] = time.perf_counter() - begin - found.seconds["cut"]
        for t in self.incoming:
            if t.link == "device":
                found.shards[t.dst_tensor][slices(t.dst_box)].view(sizes(t.box)).copy_(
                    held[t.src_tensor][slices(t.src_box)]
                )
        for other, transfers in expected.items():
            offset = 0
            for t in transfers:
                target = found.shards[t.dst_tensor][slices(t.dst_box)].view(sizes(t.box))
                piece = landing[other][offset : offset + t.nbytes]
                offset += t.nbytes
                target.copy_(piece.clone().view(target.dtype).view(target.shape))
        found.seconds["place"] = time.perf_counter() - begin - sum(found.seconds.values())
        found.placed = len(self.incoming)
        found.sent = {other: parcel.numel() for other, parcel in parcels.items()}
        found.received = {other: buffer.numel() for other, buffer in landing.items()}
        found.extra_bytes = sum(found.sent.values()) + sum(found.received.values())
        return found

    def _carry(self, parcels: Mapping[int, Tensor], landing: Mapping[int, Tensor]) -> None:
        operations = [dist.P2POp(dist.isend, parcel, other, self._group) for other, parcel in parcels.items()]
        operations += [dist.P2POp(dist.irecv, buffer, other, self._group) for other, buffer in landing.items()]
        if not operations:
            return
        names = [f"send to rank {other}" for other in parcels] + [f"receive from rank {other}" for other in landing]
        end = time.monotonic() + self._deadline
        for work, what in zip(dist.batch_isend_irecv(operations), names, strict=True):
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                where = f"rank {self._rank}: {what}"
                if time.monotonic() >= end:
                    raise DeadlineError(f"{where}: not done within {self._deadline:g} s") from error
                raise PeerLostError(f"{where}: {error}") from error

    def _by_rank(self, transfers: list[Transfer], *, sending: bool) -> dict[int, list[Transfer]]:
        found: dict[int, list[Transfer]] = {}
        for t in transfers:
            if t.link != "device":
                found.setdefault(self._rank_of[t.dst] if sending else t.src, []).append(t)
        return dict(sorted(found.items()))


def _local_shapes(plan: Plan, part: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype code of each tensor that a rollout rank keeps."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for weight in plan.weights:
        for share in plan.rollout.shares(weight):
            if part in share.ranks:
                name, box = plan.rollout.local(weight, share.box, share.box)
                reach = tuple(high for _, high in box)
                before = found.get(name, (reach, weight.dtype))[0]
                found[name] = tuple(max(a, b) for a, b in zip(before, reach, strict=True)), weight.dtype
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
