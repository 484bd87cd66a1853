"""Carrying out a plan in place: every rank of a process group makes the same calls, and only missing slices travel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from rlctl.errors import UsageError
from rlctl.hybrid.reshard.deltas import DeltaRun, KeptRun, SentBase
from rlctl.hybrid.reshard.idle_memory import IdleMemory
from rlctl.hybrid.reshard.micro_groups import group_ranks
from rlctl.hybrid.reshard.pieces import APART_NBYTES
from rlctl.hybrid.reshard.report import Switched, SwitchReport
from rlctl.hybrid.reshard.schedule import schedule
from rlctl.hybrid.reshard.sockets import bound_send_buffers
from rlctl.hybrid.reshard.switching import DEPTH, Run
from rlctl.hybrid.reshard.watch import Watch
from rlctl.hybrid.reshard.wire import Wire
from rlctl.sync.plan import Plan

BUCKET_NBYTES = 64 << 20


class Resharder:
    """Switches between a training and a generation layout on the same devices.

    Args:
        plan: from the training layout to the generation layout; equal on all ranks. Weights have the dtype that the
            rollout computes in: shards are cast to it before they travel. The devices of its placement, in order, are
            the ranks of the group.
        group: the ranks; None: the default group, or this process alone when there is none.
        deadline: seconds that one wait for other ranks may take.
        delta: send only what changed since the last switch. The generation shards are kept while training, and a copy
            of what this rank sends, as it was sent: ``SwitchReport.kept_bytes``.
        names: only these weights (of a LoRA run, the adapter's).
        bucket_nbytes: memory for slices that are cut, cast or received apart from where they lie; about so much is
            taken beside the generation shards.
        gather_below: slices of fewer bytes go by collectives where micro-groups exchange alike. Default: all on NCCL;
            on the CPU only what would not leave and arrive where it lies; none in a group other than the default one,
            whose parts cannot be made into groups.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | None,
        *,
        deadline: float,
        delta: bool = False,
        names: Collection[str] | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        gather_below: float | None = None,
    ) -> None:
        self.plan = plan
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        size = 1 if self._group is None else dist.get_world_size(self._group)
        if len(group_ranks(plan)) != size:
            raise UsageError(f"the plan is for {len(group_ranks(plan))} devices, and the group has {size} ranks")
        self._deadline = deadline
        self._delta = delta
        if size == 1 or self._group is not dist.group.WORLD or delta:
            gather_below = 0
        elif gather_below is None:
            gather_below = math.inf if _backend(self._group) == "nccl" else APART_NBYTES
        self._schedule = schedule(
            plan, self._rank, round_nbytes=bucket_nbytes // DEPTH, gather_below=gather_below, names=names
        )
        self._groups = _micro_groups(self._group, self._schedule.groups, size)
        if size > 1 and _backend(self._group) != "nccl":
            bound_send_buffers()
        self._watch = Watch(self._group, self._rank, size)
        self._shards: dict[str, torch.Tensor] | None = None
        self._version: int | None = None
        self._base: SentBase | None = None
        self._idle = IdleMemory()

    def to_rollout(
        self,
        held: Mapping[str, torch.Tensor],
        *,
        version: int | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Switched:
        """Bring this rank what its generation shards lack.

        Args:
            held: training shards, by the names of the training layout, of any dtype, on one device.
            version: of the weights. When it is the one that the shards have already, nothing moves.
            into: generation shards to fill (an engine's own parameters); default: memory of its own, and a shard that
                is just what the trainer holds is that tensor itself, unless it is kept for deltas.

        Raises:
            ReshardError: a rank is dead or stuck; names it and its phase.
            MismatchError: a shard is not there or not of the layout's shape.
        """
        if version is not None and version == self._version and self._shards is not None:
            return Switched(self._shards, SwitchReport(kept_bytes=self.kept_nbytes))
        wire = Wire(self._group, self._groups, self._watch, self._deadline)
        run: Run
        if self._base is None or self._shards is None:
            run = (KeptRun if self._delta else Run)(self._schedule, held, wire, self._watch, self._idle)
        else:
            run = DeltaRun(self._schedule, held, wire, self._watch, self._idle, self._base, self._shards)
        # What an unfinished switch leaves is nobody's base.
        base, self._base, self._shards, self._version = self._base, None, None, None
        with self._watch.switch():
            found = run.all(into)
        if self._delta:
            self._base = base or SentBase(self._schedule, self._idle)
            self._base.renew(held)
        self._shards, self._version = found, version
        return Switched(found, replace(run.report(self._rank), kept_bytes=self.kept_nbytes))

    @property
    def kept_nbytes(self) -> int:
        """Bytes that stay here while training, for deltas: generation shards, and what this rank sent."""
        if self._base is None or self._shards is None:
            return 0
        return self._base.nbytes + sum(shard.nbytes for shard in self._shards.values())

    def to_training(self) -> None:
        """Let go of the generation shards, unless deltas need them. Nothing moves: what is trained never left."""
        if not self._delta:
            self._shards = self._version = None
        self._idle.rest()


def _backend(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else str(dist.get_backend(group))


def _micro_groups(
    group: dist.ProcessGroup | None, sets: Collection[tuple[int, ...]], size: int
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a group for each set of ranks that has collectives of its own. Every rank of the default group makes all
    of them: torch has no other way that is safe where ranks have made different groups before."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted(sets):
        assert group is not None
        found[members] = group if len(members) == size else dist.new_group(list(members), backend=_backend(group))
    return found
