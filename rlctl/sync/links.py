"""How fast bytes go between devices: figures of a profile, or fitted to a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlctl.errors import UsageError
from rlctl.schema.layout import LinkConfig

LinkKind = Literal["device", "node", "network"]
LINK_KINDS: tuple[LinkKind, ...] = ("device", "node", "network")


@dataclass(frozen=True)
class LinkSpeed:
    """One direction of one link: ``latency + bytes / bytes_per_second`` for a message."""

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """Return the seconds for ``nbytes`` in ``messages`` messages, one after another."""
        return messages * self.latency + nbytes / self.bytes_per_second

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float]]) -> LinkSpeed:
        """Return the speed that explains measured (bytes, seconds), least squares of relative errors.

        Raises UsageError for fewer than two sizes.
        """
        sizes = np.array([n for n, _ in samples], dtype=float)
        seconds = np.array([s for _, s in samples])
        if len(set(sizes)) < 2 or not (seconds > 0).all():
            raise UsageError("a link's speed needs positive times of at least two sizes")
        system = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
        (latency, per_byte), *_ = np.linalg.lstsq(system, np.ones_like(seconds), rcond=None)
        if latency < 0:
            latency, per_byte = 0.0, float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
        if per_byte <= 0:
            raise UsageError("these times do not grow with the size: no bandwidth fits them")
        return cls(1 / float(per_byte), float(latency))


@dataclass(frozen=True)
class LinkModel:
    """Speeds by kind of link.

    Attributes:
        device: inside one device (or host memory): between two processes or layouts on it.
        node: one device's link to the others of its node.
        network: one network card.
        host: what all ranks of one node can move together, where they share the cores and the memory that move it (on
            CPUs); None where devices have links of their own.
        flow: what goes from one rank to one other, where a thread or a socket bounds that below the link; None where it
            fills the link.
        sync: seconds that a sync takes beside its bytes: its members meet, say what they have, and compare at the end.
    """

    device: LinkSpeed
    node: LinkSpeed
    network: LinkSpeed
    host: LinkSpeed | None = None
    flow: LinkSpeed | None = None
    sync: float = 0.0

    @classmethod
    def of_profile(cls, links: LinkConfig) -> LinkModel:
        """Return the model of a profile's figures (decimal GB/s)."""
        for name in ("intra_node_gbps", "inter_node_gbps", "host_device_gbps"):
            if not getattr(links, name) > 0:
                raise UsageError(f"{name} must be above 0 to predict seconds")
        return cls(
            device=LinkSpeed(max(links.host_device_gbps, links.intra_node_gbps) * 1e9, 1e-5),
            node=LinkSpeed(links.intra_node_gbps * 1e9, 1e-5),
            network=LinkSpeed(links.inter_node_gbps * 1e9, 2e-5),
        )

    def speed(self, kind: LinkKind | Literal["host"]) -> LinkSpeed:
        """Return the speed of one kind of link, or of a host that states one."""
        found = getattr(self, kind)
        assert isinstance(found, LinkSpeed)
        return found
