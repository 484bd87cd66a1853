"""The checkpoint engine of devices that both train and generate: each takes what it lacks from the others, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rlctl.errors import UsageError
from rlctl.hybrid.device_plan import device_plan
from rlctl.hybrid.padded import make_resharder
from rlctl.hybrid.reshard.report import SwitchReport
from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.hybrid.verifying import require_arrived
from rlctl.sync.engine import (
    Arrivals,
    CheckpointEngine,
    EngineOptions,
    Kwargs,
    Member,
    Metadata,
    Stream,
    TransferStats,
)
from rlctl.sync.errors import MismatchError, WrongBaseError
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.plan import Plan
from rlctl.sync.traits import Delivery

#: Phase of a switch -> of a transfer.
_PHASES = {"cut": "pack", "wire": "wire", "place": "load"}


class ReshardEngine(CheckpointEngine):
    """One device's part. There are no two sides: all members are trainers, and what ``send_weights`` brings is read by
    ``receive_weights`` of the same engine, under the names of the rollout's layout. Ranks find each other by
    ``torch.distributed``'s default group, which is there before ``init_process_group``.

    Option ``replicas``: how many replicas of ``layouts.rollout`` generate; default: as many as there is room for.
    Option ``delta``: the generation shards are kept while training, and only what changed in them moves.
    Option ``devices_per_node``: so that what is missing comes from near.

    Attributes:
        shards: what this device generates with; empty before the first sync and after ``release``.
        report: of what the last sync moved.
        digest: of what arrived in it, over all parts; empty when nothing is verified.
    """

    name = "reshard"
    delivers: ClassVar[Delivery] = "slices"

    def __init__(self, member: Member, options: EngineOptions) -> None:
        super().__init__(member, options)
        if self.layouts is None:
            raise UsageError(
                "backend reshard moves parts from one layout to another, and none are declared",
                fix="give EngineOptions(layouts=...); to whole copies of the weights use another backend",
            )
        if member.role != "trainer":
            raise UsageError(f"{member}: with backend reshard all members are trainers, which generate, too")
        rollout = self.layouts.rollout
        count = int(self.options.extras.get("replicas", 0)) or member.world // rollout.ranks
        self.plan: Plan = device_plan(
            self.layouts.weights,
            self.layouts.train,
            replace(rollout, replicas=count),
            devices_per_node=int(self.options.extras.get("devices_per_node", 0)),
        )
        self.shards: dict[str, torch.Tensor] = {}
        self.report = SwitchReport()
        self.digest = b""
        dtypes = {weight.name: weight.dtype for weight in self.layouts.weights}
        self._outgoing = [(t, dtypes[t.tensor]) for t in self.plan.transfers(src=member.rank)]
        self._incoming = list(self.plan.transfers(dst=self.part)) if self.part >= 0 else []
        self._resharder: Resharder | None = None
        self._version: int | None = None

    @property
    def part(self) -> int:
        """This device's rank among those that generate, -1 for none."""
        device = self.plan.placement.train[self.member.rank]
        places = self.plan.placement.rollout
        return places.index(device) if device in places else -1

    def prepare(self, timeout: float | None = None) -> Metadata:
        """See CheckpointEngine."""
        self._begin(timeout)
        assert self.layouts is not None
        return {"layouts": self.layouts.fingerprint, "moved": self.plan.bytes_moved}

    @classmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """See CheckpointEngine. Raises MismatchError when members have other layouts."""
        if rollout_world:
            raise UsageError(f"backend reshard has no rollout members, and there are {rollout_world}")
        other = [rank for rank, told in enumerate(metadata) if told["layouts"] != metadata[0]["layouts"]]
        if other:
            raise MismatchError(f"trainer {other[0]} and trainer 0 have other layouts")
        return [{} for _ in range(trainer_world)]

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine."""
        assert not kwargs
        if self._resharder is None:
            self._resharder = make_resharder(
                self.plan,
                self._group,
                deadline=self.options.timeout,
                delta=bool(self.options.extras.get("delta", False)),
                bucket_nbytes=self.options.bucket_size,
            )

    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """Take this rank's training shards (weight, part), of any dtype, and have its generation shards afterwards. All
        ranks call it. Bytes counted are those that left this device."""
        clock = PhaseClock()
        with clock.phase("gather"):
            held = dict(stream)
        self.release()
        shards = self.bring(held, version)
        with clock.phase("load"):
            self.digest = require_arrived(
                self._outgoing,
                self._incoming,
                held,
                shards,
                group=self._group,
                version=version,
                verify=self.options.verify,
            )
        self.shards, self._version = shards, version
        for phase, seconds in self.report.seconds.items():
            clock.seconds[_PHASES[phase]] += seconds
        return self._close_stats(clock, tensors=len(self._incoming), bytes_moved=self.report.sent_bytes)

    def bring(self, held: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        """Return this rank's generation shards out of what all ranks hold."""
        assert self._resharder is not None
        switched = self._resharder.to_rollout(held, version=version)
        self.report = switched.report
        return switched.shards

    def receive_weights(self, version: int, *, base_version: int | None = None) -> Arrivals:
        """See CheckpointEngine: what this device generates with, by the rollout layout's local names."""
        if version != self._version:
            raise WrongBaseError(f"{self.member}: holds version {self._version}, and {version} is asked for")
        yield from self.shards.items()

    @property
    def extra_nbytes(self) -> int:
        """See CheckpointEngine."""
        return self.report.peak_extra_bytes

    def release(self) -> None:
        """Let go of the generation shards, but for those that deltas need: nothing moves."""
        self.shards, self._version = {}, None
        if self._resharder is not None:
            self._resharder.to_training()

    def finalize(self) -> None:
        """See CheckpointEngine."""

    def close(self) -> None:
        """See CheckpointEngine."""
        self.release()
        self._resharder = None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.is_initialized() else None
