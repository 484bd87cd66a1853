"""The bytes that a plan moves, and the seconds that they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlctl.sync.links import LINK_KINDS, LinkKind, LinkModel
from rlctl.sync.placement import Placement

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a transfer, which resource sets them, and the seconds of each kind of resource, without those that a
    sync takes beside its bytes."""

    seconds: float
    bottleneck: str
    by_resource: dict[str, float]


@dataclass
class Traffic:
    """Bytes by kind of link.

    Attributes:
        sent: by trainer rank; ``received``: by rollout rank.
        card_sent, card_received: by network card, numbered through all nodes.
        pairs: (trainer rank, rollout rank, link) -> bytes.
    """

    placement: Placement
    sent: dict[LinkKind, Counts] = field(default_factory=dict)
    received: dict[LinkKind, Counts] = field(default_factory=dict)
    card_sent: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    card_received: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    pairs: Counter[tuple[int, int, LinkKind]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        placement = self.placement
        cards = 1 + max(map(placement.cluster.nic, (*placement.train, *placement.rollout)))
        self.sent = {kind: np.zeros(len(placement.train), np.int64) for kind in LINK_KINDS}
        self.received = {kind: np.zeros(len(placement.rollout), np.int64) for kind in LINK_KINDS}
        self.card_sent = np.zeros(cards, np.int64)
        self.card_received = np.zeros(cards, np.int64)

    def add(self, src: int, dst: int, link: LinkKind, nbytes: int) -> None:
        """Count ``nbytes`` from trainer rank ``src`` to rollout rank ``dst``."""
        self.sent[link][src] += nbytes
        self.received[link][dst] += nbytes
        self.pairs[src, dst, link] += nbytes
        if link == "network":
            nic = self.placement.cluster.nic
            self.card_sent[nic(self.placement.train[src])] += nbytes
            self.card_received[nic(self.placement.rollout[dst])] += nbytes

    @property
    def moved(self) -> int:
        """Bytes between devices: what a sync puts on wires."""
        return int(self.received["node"].sum() + self.received["network"].sum())

    def predict(self, links: LinkModel, *, bucket_nbytes: int = 1 << 30) -> Prediction:
        """Return the seconds of a sync in which all links work at once: those of the busiest one.

        Each pair of ranks sends its slices together, in messages of ``bucket_nbytes``; a link's messages come one
        after another. A host's own speed, if it has one, bounds the sum of what its devices send and receive, and that
        of a flow what one rank sends another.
        """
        seconds: dict[str, float] = {}
        loads = self._loads(bucket_nbytes)
        for (kind, direction, _), (nbytes, messages) in loads.items():
            name = f"{kind} {direction}"
            seconds[name] = max(seconds.get(name, 0.0), links.speed(kind).seconds(nbytes, messages))
        if links.host is not None:
            seconds["host"] = max((links.host.seconds(*load) for load in self._host_loads(bucket_nbytes)), default=0.0)
        if links.flow is not None:
            flows = ((n, -(-n // bucket_nbytes)) for (_, _, kind), n in self.pairs.items() if kind != "device")
            seconds["flow"] = max((links.flow.seconds(*load) for load in flows), default=0.0)
        worst = max(seconds, key=lambda name: seconds[name], default="")
        return Prediction(links.sync + seconds.get(worst, 0.0), worst, seconds)

    def _loads(self, bucket_nbytes: int) -> dict[tuple[LinkKind, str, int], tuple[int, int]]:
        """Return (kind, direction, device or card) -> (bytes, messages)."""
        loads: dict[tuple[LinkKind, str, int], tuple[int, int]] = {}
        nic = self.placement.cluster.nic
        for (src, dst, kind), nbytes in self.pairs.items():
            out, into = self.placement.train[src], self.placement.rollout[dst]
            ends = ((kind, "out", nic(out)), (kind, "in", nic(into)))
            if kind != "network":
                ends = ((kind, "out", out), (kind, "in", into))
            for key in ends[1:] if kind == "device" else ends:
                bytes_, messages = loads.get(key, (0, 0))
                loads[key] = bytes_ + nbytes, messages + -(-nbytes // bucket_nbytes)
        return loads

    def _host_loads(self, bucket_nbytes: int) -> list[tuple[int, int]]:
        """Return (bytes, messages) of each node: what goes between its devices, out of it and into it."""
        loads: dict[int, tuple[int, int]] = {}
        node = self.placement.cluster.node
        for (src, dst, _), nbytes in self.pairs.items():
            for where in {node(self.placement.train[src]), node(self.placement.rollout[dst])}:
                bytes_, messages = loads.get(where, (0, 0))
                loads[where] = bytes_ + nbytes, messages + -(-nbytes // bucket_nbytes)
        return list(loads.values())
