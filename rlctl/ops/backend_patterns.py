"""How each checkpoint engine carries weights, in words, and whether it sends more than the plan asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_BROADCAST = "each sending trainer rank broadcasts its share of the tensors to all rollout workers"
_READ = "each rollout worker reads whole tensors from the trainer ranks"


@dataclass(frozen=True)
class Pattern:
    """Attributes:
    words: who does what.
    whole: every rollout rank is sent whole tensors, so with tensor-parallel replicas more than its slices.
    """

    words: str
    whole: bool = True


PATTERNS: Mapping[str, Pattern] = MappingProxyType(
    {
        "naive": Pattern("trainer ranks gather each tensor and hand it to the engine on their own device", whole=False),
        "reshard": Pattern("each device keeps what it needs and takes the missing slices from others", whole=False),
        "ipc": Pattern("engines read the trainer's weights through memory of their node", whole=False),
        "gloo": Pattern(_BROADCAST),
        "nccl": Pattern(_BROADCAST),
        "hccl": Pattern(_BROADCAST),
        "kimi": Pattern(
            "each trainer rank stages its share in host memory; they take turns to broadcast to all workers"
        ),
        "nixl": Pattern(_READ),
        "mooncake": Pattern(_READ),
        "file": Pattern("trainer ranks write their shares into a folder; each rollout worker reads all of it"),
    }
)
