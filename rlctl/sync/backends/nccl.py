"""Weights over NCCL, between CUDA devices.

Each sender's group is a communicator of its own, not the trainer's. It is aborted by a deadline or a cancel, which NCCL
only survives when its watchdog leaves the process alone: ``WATCHDOG`` says how it is told.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.backends.collective import CollectiveEngine, CollectiveGroup
from rlctl.sync.backends.device_group import DeviceGroup
from rlctl.sync.bucket_engine import Acquire
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.rendezvous import MeetingStore

# What a group's own threads read when it is made: they are to report errors, not to end the process for them, and not
# to look into the store, which is gone once all have met.
WATCHDOG: Mapping[str, str] = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }
)
_ENVIRONMENT = threading.Lock()


class NcclGroup(DeviceGroup):
    """See DeviceGroup."""

    def _make(self, store: MeetingStore, rank: int, size: int, deadline: Deadline) -> Any:
        library: Any = torch.distributed.ProcessGroupNCCL
        options = library.Options()
        options._timeout = timedelta(seconds=max(deadline.remaining, 0.001))  # noqa: SLF001 - it has no other name
        options.config.blocking = 0  # so that it can be aborted while it connects
        with environment(WATCHDOG):
            return library(store, rank, size, options)

    def _abort(self, group: Any) -> None:
        group.abort()


class NcclEngine(CollectiveEngine):
    """See the module. Buckets are on the device; ``options.device`` says which."""

    name = "nccl"
    kind: ClassVar[str] = "cuda"
    group_class: ClassVar[type[DeviceGroup]] = NcclGroup

    def __init__(self, member: Member, options: EngineOptions) -> None:
        if torch.device(options.device).type != self.kind:
            raise UsageError(
                f"backend {self.name} moves weights between {self.kind} devices, and the engine's device is "
                f"{options.device}",
                fix=f"device {self.kind}, or backend gloo",
            )
        super().__init__(member, options)

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            raise UnavailableError(
                "this build of torch has no NCCL", fix="install a CUDA build of torch, or use sync.backend=gloo"
            )
        if not torch.cuda.is_available():
            raise UnavailableError("no CUDA device is visible", fix="CUDA_VISIBLE_DEVICES, or sync.backend=gloo")

    def _open_group(self, store: MeetingStore, rank: int, peers: list[str]) -> CollectiveGroup:
        return self.group_class(store, rank, peers, self.options.device, self.deadline)

    def _received(
        self, clock: PhaseClock, version: int, base_version: int | None, acquire: Acquire
    ) -> Iterator[FilledBucket]:
        for bucket in super()._received(clock, version, base_version, acquire):
            yield bucket
            self._settle()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside, for libraries that read them there, and put back what was."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
