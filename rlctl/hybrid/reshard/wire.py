"""Messages and micro-group collectives of a process group, counted and with a deadline on every wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from rlctl.hybrid.reshard.errors import ReshardError
from rlctl.hybrid.reshard.watch import Watch
from rlctl.units import format_duration

# How often a wait that cannot block looks.
POLL = 50e-6
# A wait whose deadline has passed while this rank was busy still finds what has arrived.
LEAST = 0.05
# Its name since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Parcel(NamedTuple):
    """The bytes of a message, contiguous, and the two ranks; sent and received under one tag, in order."""

    src: int
    dst: int
    data: torch.Tensor
    tag: int = 0


class Pending(NamedTuple):
    """What is waited for together: the works, the ranks that each is waited for, and when it began."""

    works: list[tuple[dist.Work, int]]
    begin: float


@dataclass
class Counts:
    """What went over a wire; see ``SwitchReport``."""

    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_p2p: int = 0
    num_all_gather: int = 0
    slowest: float = 0.0
    control: int = 0


class Wire:
    """One rank's connection to the others.

    Args:
        group: None: this process alone, which never sends.
        groups: micro-groups, by their ranks of the group.
        watch: who is told what is waited for.
        deadline: seconds that one wait may take.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        watch: Watch,
        deadline: float,
    ) -> None:
        self.counts = Counts()
        self._groups = groups
        self._group = group
        self._watch = watch
        self._deadline = deadline
        # There messages must be started together, and waits only order the stream and never end by a deadline.
        self._on_gpu = group is not None and dist.get_backend(group) == "nccl"

    @property
    def any_time(self) -> bool:
        """Whether messages may be posted long before the other rank does, and in another order."""
        return not self._on_gpu

    def post(self, parcels: Sequence[Parcel], *, control: bool = False) -> Pending:
        """Start sending what is from here and receiving what is for here; the memory is in use until ``wait``.

        ``control``: they are about weights, and no weights.
        """
        begin = time.monotonic()
        peers = []
        # One order on all ranks, which a backend without tags needs.
        ordered = sorted(parcels, key=lambda parcel: (parcel.src, parcel.dst))
        for parcel in ordered:
            mine = parcel.src == self._watch.rank
            peers.append(parcel.dst if mine else parcel.src)
            if control:
                self.counts.control += parcel.data.nbytes if mine else 0
            else:
                self.counts.pairs[parcel.src, parcel.dst] += parcel.data.numel()
        self.counts.num_p2p += 0 if control else len(peers)
        if not peers:
            return Pending([], begin)
        try:
            works = self._batch(ordered, peers) if self._on_gpu else self._one_by_one(ordered, peers)
        except RuntimeError as error:
            raise self._error(peers, error, late=False) from error
        if len(works) == len(peers):
            return Pending(list(zip(works, peers, strict=True)), begin)
        return Pending([(work, peer) for work in works for peer in peers], begin)

    def gather(self, members: tuple[int, ...], data: torch.Tensor) -> None:
        """Bring all members of a micro-group what each has: ``data`` is as many equal parts, this rank's filled.

        Raises ReshardError, naming who holds it up.
        """
        begin = time.monotonic()
        others = [member for member in members if member != self._watch.rank]
        own = data.chunk(len(members))[members.index(self._watch.rank)]
        try:
            group = self._groups[members]
            work = _all_gather(data, own, group=group, async_op=True)
            assert work is not None
            self._wait_one(work, self._deadline)
        except RuntimeError as error:
            raise self._error(others, error, late=time.monotonic() >= begin + self._deadline) from error
        for other in others:
            self.counts.pairs[self._watch.rank, other] += own.numel()
            self.counts.pairs[other, self._watch.rank] += own.numel()
        self.counts.num_all_gather += 1
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - begin)

    def wait(self, pending: Pending) -> None:
        """Wait until all that was posted has come and gone. Raises ReshardError, naming who holds it up."""
        deadline = time.monotonic() + self._deadline
        for place, (work, peer) in enumerate(pending.works):
            try:
                self._wait_one(work, max(deadline - time.monotonic(), LEAST))
            except RuntimeError as error:
                late = time.monotonic() >= deadline
                behind = [p for _, p in pending.works[place:]] if late else [peer]
                raise self._error(behind, error, late=late) from error
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - pending.begin)

    def _one_by_one(self, parcels: Sequence[Parcel], peers: Sequence[int]) -> list[dist.Work]:
        assert self._group is not None
        calls = (self._group.recv, self._group.send)
        return [
            calls[parcel.src == self._watch.rank]([parcel.data], peer, parcel.tag)
            for parcel, peer in zip(parcels, peers, strict=True)
        ]

    def _batch(self, parcels: Sequence[Parcel], peers: Sequence[int]) -> list[dist.Work]:
        ops = []
        for parcel, peer in zip(parcels, peers, strict=True):
            call = dist.isend if parcel.src == self._watch.rank else dist.irecv
            ops.append(dist.P2POp(call, parcel.data, group=self._group, group_peer=peer))
        return dist.batch_isend_irecv(ops)

    def _wait_one(self, work: dist.Work, seconds: float) -> None:
        if self._on_gpu:
            end = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError("the wait ended by its deadline")
                time.sleep(POLL)
        work.wait(timedelta(seconds=seconds))

    def _error(self, waited: Sequence[int], error: RuntimeError, *, late: bool) -> ReshardError:
        found = self._watch.culprits(sorted(set(waited)))
        who = ", ".join(f"rank {rank} (phase {phase!r})" for rank, phase in sorted(found.items()))
        here = f"rank {self._watch.rank}, in phase 'wire' of a switch,"
        if late:
            return ReshardError(f"{here} waited {format_duration(self._deadline)} for {who}", ranks=found, phase="wire")
        cause = str(error).splitlines()[0]
        return ReshardError(f"{here} lost {who}: {cause}", ranks=found, phase="wire")
