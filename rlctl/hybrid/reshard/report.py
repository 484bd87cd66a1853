"""What a switch tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

PHASES = ("cut", "wire", "place")


@dataclass(frozen=True)
class SwitchReport:
    """One switch of one rank. All bytes are those of weights on a wire; what stays on a device counts nowhere.

    Attributes:
        sent_bytes, received_bytes: by this rank.
        num_all_gather: collectives of micro-groups that it took part in; ``num_p2p``: messages that it sent or got.
        max_latency_ms: the longest wait for one message, or one collective, from its start to its end.
        device_pairs: (rank that sends, rank that receives) -> bytes, where this rank is one of them.
        seconds: wall seconds by phase: slices cut and cast, on the wire, put in place.
        kept_bytes: generation shards, and a copy of what was sent, that are kept while training, for deltas.
        peak_extra_bytes: memory taken beside what the rank held: generation shards, buckets, and codes of deltas.
        copied_bytes: of those, parts of generation shards that this rank holds, too, but not so that they could stay
            where they are.
        control_bytes: sent beside weights, to agree on the sizes of deltas.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    num_all_gather: int = 0
    num_p2p: int = 0
    max_latency_ms: float = 0.0
    device_pairs: Mapping[tuple[int, int], int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    kept_bytes: int = 0
    peak_extra_bytes: int = 0
    copied_bytes: int = 0
    control_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What this rank sent: over all ranks, each byte once."""
        return self.sent_bytes


@dataclass(frozen=True)
class Switched:
    """A rank's generation shards, by the names of the rollout's layout, and what bringing them took."""

    shards: dict[str, torch.Tensor]
    report: SwitchReport
