"""The table of checkpoint engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.registry import Registry

if TYPE_CHECKING:
    from rlctl.sync.engine import CheckpointEngine

CHECKPOINT_ENGINES: Registry[type[CheckpointEngine]] = Registry(
    "checkpoint engine",
    {
        "naive": "rlctl.sync.backends.naive:NaiveEngine",
        "ipc": "rlctl.sync.backends.ipc:IpcEngine",
        "gloo": "rlctl.sync.backends.gloo:GlooEngine",
        "nccl": "rlctl.sync.backends.nccl:NcclEngine",
        "hccl": "rlctl.sync.backends.hccl:HcclEngine",
        "kimi": "rlctl.sync.backends.kimi:KimiEngine",
        "mooncake": "rlctl.sync.backends.mooncake:MooncakeEngine",
        "file": "rlctl.sync.backends.file:FileEngine",
        "nixl": "rlctl.sync.backends.nixl:NixlEngine",
        "reshard": "rlctl.hybrid.checkpoint_engine:ReshardEngine",
    },
    group="rlctl.checkpoint_engines",
    base="rlctl.sync.engine:CheckpointEngine",
)
