"""The memory copy that a sync bench takes its ratios against, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rlctl.ops.sync_bench_contest import MAKE, SEED, SETUP_SECONDS, TARGET, Contestant, Sample
from rlctl.ops.sync_bench_member import Usage
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.tensor_meta import TensorMeta


class CopyContestant(Contestant):
    """The limit: each tensor copied inside one process, once for each rollout worker. What verification costs is
    measured beside it, outside its time."""

    def __init__(self, tensors: Sequence[TensorMeta], rollouts: int, change: float) -> None:
        self._tensors = tensors
        self._rollouts = rollouts
        self._change = change
        self._process = MemberProcesses("trainer", 1, "gloo", EngineOptions(), target=TARGET)

    def open(self) -> None:
        """See Contestant."""
        self._process.open(SETUP_SECONDS)
        self._ask("load", factory=MAKE, arguments={"tensors": self._tensors, "seed": SEED})
        self._ask("make_copy")

    def rep(self, step: int) -> Sample:
        """See Contestant."""
        self._ask("mutate", step=step, change=self._change)
        self._ask("begin")
        seconds = self._ask("copy", times=self._rollouts)
        usage = msgspec.convert(self._ask("usage"), Usage)
        moved = sum(meta.nbytes for meta in self._tensors) * self._rollouts
        return Sample(seconds, (usage.cpu_s, 0.0), moved, hash_cpu_s=self._ask("hash_cost"))

    def close(self) -> None:
        """See Contestant."""
        self._process.close()

    def _ask(self, command: str, **arguments: Any) -> Any:
        return self._process.ask(command, Deadline(SETUP_SECONDS), **arguments)[0]
