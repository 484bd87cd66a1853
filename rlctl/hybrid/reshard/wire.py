"""Messages and micro-group collectives of a process group, counted and with a deadline on every wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
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


class Parcel(NamedTuple):
    """The bytes of a message, contiguous, and the two ranks."""

    src: int
    dst: int
    data: torch.Tensor


class Pending(NamedTuple):
    """What was posted together: the works, the ranks that each is waited for, and when it began."""

    works: list[tuple[dist.Work, int]]
    begin: float


@dataclass
class Counts:
    """What went over a wire; see ``SwitchReport``."""

    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_p2p: int = 0
    num_all_gather: int = 0
    slowest: float = 0.0


class Wire:
    """One rank's connection to the others.

    Args:
        group: None: this process alone, which never sends.
        watch: who is told what is waited for.
        deadline: seconds that one wait may take.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: Watch, deadline: float) -> None:
        self.counts = Counts()
        self._group = group
        self._watch = watch
        self._deadline = deadline

    def post(self, parcels: Sequence[Parcel]) -> Pending:
        """Start sending what is from here and receiving what is for here; the memory is in use until ``wait``."""
        begin = time.monotonic()
        ops, peers = [], []
        # One order on all ranks, which a backend without tags needs.
        for parcel in sorted(parcels, key=lambda parcel: (parcel.src, parcel.dst)):
            mine = parcel.src == self._watch.rank
            peer = parcel.dst if mine else parcel.src
            call = dist.isend if mine else dist.irecv
            ops.append(dist.P2POp(call, parcel.data, group=self._group, group_peer=peer))
            peers.append(peer)
            self.counts.pairs[parcel.src, parcel.dst] += parcel.data.numel()
        self.counts.num_p2p += len(ops)
        if not ops:
            return Pending([], begin)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._error(peers, str(error)) from error
        if len(works) == len(peers):
            return Pending(list(zip(works, peers, strict=True)), begin)
        return Pending([(work, peer) for work in works for peer in peers], begin)

    def wait(self, pending: Pending) -> None:
        """Wait until all that was posted has come and gone. Raises ReshardError, naming who holds it up."""
        deadline = pending.begin + self._deadline
        for place, (work, peer) in enumerate(pending.works):
            try:
                self._wait_one(work, max(deadline - time.monotonic(), 1e-3))
            except RuntimeError as error:
                behind = [peer] if "closed" in str(error) else [p for _, p in pending.works[place:]]
                raise self._error(behind, str(error)) from error
        self.counts.slowest = max(self.counts.slowest, time.monotonic() - pending.begin)

    def _wait_one(self, work: dist.Work, seconds: float) -> None:
        # On a GPU, waiting for a work only orders the stream, and never ends by a deadline.
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            end = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError("the wait ended by its deadline")
                time.sleep(POLL)
        work.wait(timedelta(seconds=seconds))

    def _error(self, waited: Sequence[int], why: str) -> ReshardError:
        phase = "wire"
        found = self._watch.culprits(sorted(set(waited)))
        who = ", ".join(f"rank {rank} (phase {where!r})" for rank, where in sorted(found.items()))
        lost = "lost its connection to" if "closed" in why else "waited for"
        within = "" if "closed" in why else f" for {format_duration(self._deadline)}"
        return ReshardError(
            f"rank {self._watch.rank} {lost} {who}{within} in phase {phase!r} of a switch", ranks=found, phase=phase
        )
