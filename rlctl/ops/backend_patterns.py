"""How each checkpoint engine carries weights, in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BROADCAST = "each sending trainer rank broadcasts its share to all rollout workers that want the same"
_READ = "each rollout worker reads what it wants from the trainer ranks"

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "naive": "trainer ranks gather each tensor and hand it to the engine on their own device",
        "reshard": "each device keeps what it needs and takes the missing slices from others",
        "ipc": "engines read the trainer's weights through memory of their node",
        "gloo": _BROADCAST,
        "nccl": _BROADCAST,
        "hccl": _BROADCAST,
        "kimi": "each trainer rank stages its share in host memory; they take turns to broadcast to the workers",
        "nixl": _READ,
        "mooncake": _READ,
        "file": "trainer ranks write their shares into a folder; each rollout worker reads what it wants",
    }
)
