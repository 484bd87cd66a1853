"""A backend without two sides in a sync bench: devices that hold shards, some of which take the whole weights."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.ops.sync_bench_contest import SEED, SETUP_SECONDS, Contestant, Sample
from rlctl.ops.sync_bench_member import Usage
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, TransferStats
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.phase_clock import PHASES
from rlctl.sync.slicing import Layouts
from rlctl.sync.tensor_meta import TensorMeta
from rlctl.sync.undertaker import Undertaker
from rlctl.sync.weights import Weight

TARGET = "rlctl.ops.sync_bench_device:serve"


class InPlaceContestant(Contestant):
    """As many processes as the others have members. Each holds an FSDP shard; as many as there are rollout workers take
    whole copies, so that as much is wanted as of the others, and less has to move.

    Args: see ``SyncContestant``.
    """

    def __init__(
        self,
        backend: str,
        tensors: Sequence[TensorMeta],
        trainers: int,
        rollouts: int,
        options: EngineOptions,
        *,
        change: float = 1.0,
    ) -> None:
        world = trainers + rollouts
        weights = tuple(Weight(meta.name, meta.shape, meta.dtype) for meta in tensors)
        layouts = Layouts(weights, ParallelLayout.fsdp(world), ParallelLayout())
        self._options = replace(options, layouts=layouts, extras={**options.extras, "replicas": rollouts})
        self._devices = MemberProcesses("trainer", world, backend, self._options, target=TARGET)
        self._folder = Path(tempfile.mkdtemp(prefix="rlctl-bench-"))
        self._undertaker = Undertaker(self._folder)
        self._trainers, self._change = trainers, change

    def open(self) -> None:
        """See Contestant."""
        self._devices.open(SETUP_SECONDS)
        world, meeting = len(self._devices.members), str(self._folder / "meeting")
        self._each(
            "meet",
            [
                {"rank": rank, "world": world, "meeting": meeting, "timeout": self._options.timeout}
                for rank in range(world)
            ],
        )
        self._all("hold", seed=SEED)
        self._all("settle_memory")

    def rep(self, step: int) -> Sample:
        """See Contestant."""
        world = len(self._devices.members)
        self._all("train")
        self._all("mutate", step=step, change=self._change)
        self._all("begin")
        start = time.perf_counter()
        self._each("prepare", [{"timeout": self._options.timeout, "rank": r, "world": world} for r in range(world)])
        self._all("init_process_group")
        taken = self._all("switch", version=step)
        seconds = time.perf_counter() - start
        usages = [msgspec.convert(usage, Usage) for usage in self._all("usage")]
        stats = [msgspec.convert(found, TransferStats) for found in self._all("stats")]
        cpu = [usage.cpu_s for usage in usages]
        return Sample(
            seconds=seconds,
            cpu_by_side=(sum(cpu[: self._trainers]), sum(cpu[self._trainers :])),
            bytes_moved=sum(found.bytes_moved for found in stats),
            stall_s=seconds,
            phases={phase: max(found.seconds.get(phase, 0.0) for found in stats) for phase in PHASES},
            extra_bytes=max(max(u.extra_bytes - own, 0) for u, own in zip(usages, taken, strict=True)),
            wrong=self._wrong(),
        )

    def close(self) -> None:
        """See Contestant."""
        self._devices.close()
        self._undertaker.close()

    def _wrong(self) -> int:
        """Return how many slices are generated with that are not those that are trained."""
        found = self._all("parts")
        trained = {name: said for one in found for name, said in one["trained"].items()}
        return sum(said != trained.get(name) for one in found for name, said in one["generated"].items())

    def _all(self, command: str, **arguments: Any) -> list[Any]:
        return self._each(command, [arguments] * len(self._devices.members))

    def _each(self, command: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Have every device run a command. Raises the first error."""
        deadline = Deadline(max(SETUP_SECONDS, self._options.timeout))
        futures = self._devices.start(command, dict(enumerate(arguments)), deadline)
        try:
            return [futures[place].result() for place in range(len(arguments))]
        except RlctlError:
            self._devices.cancel(range(len(arguments)))
            raise
