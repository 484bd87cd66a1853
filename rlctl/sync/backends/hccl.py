"""Weights over HCCL, between Ascend devices: as ``nccl``, with torch_npu's group and device."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from rlctl.errors import UnavailableError
from rlctl.sync.backends.device_group import DeviceGroup
from rlctl.sync.backends.nccl import NcclEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.rendezvous import MeetingStore


class HcclGroup(DeviceGroup):
    """See DeviceGroup."""

    def _make(self, store: MeetingStore, rank: int, size: int, deadline: Deadline) -> Any:
        library: Any = import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL  # noqa: SLF001 - as torch_npu
        options = library.Options()
        options.is_high_priority_stream = False
        options._timeout = timedelta(seconds=max(deadline.remaining, 0.001))  # noqa: SLF001 - it has no other name
        return library(store, rank, size, options)

    def _abort(self, group: Any) -> None:
        group.abort_hccl_comm("the sync was ended")


class HcclEngine(NcclEngine):
    """See the module."""

    name = "hccl"
    kind = "npu"
    group_class = HcclGroup

    @classmethod
    def available(cls) -> None:
        """See CheckpointEngine."""
        if find_spec("torch_npu") is None:
            raise UnavailableError(
                "the package torch_npu is not installed", fix="pip install torch-npu, or backend gloo"
            )
        import_module("torch_npu")
        npu: Any = getattr(torch, "npu", None)
        if npu is None or not npu.is_available():
            raise UnavailableError("no Ascend device is visible", fix="ASCEND_RT_VISIBLE_DEVICES, or backend gloo")
