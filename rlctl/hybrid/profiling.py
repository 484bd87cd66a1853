"""What the switches of a hybrid engine moved, and what generation said among the ranks of a replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from rlctl.hybrid.reshard.report import SwitchReport
from rlctl.hybrid.tp.group import Said
from rlctl.hybrid.zeros import zeros_nbytes
from rlctl.sync.plan import Plan


class Moved(msgspec.Struct):
    """One rank's part in one switch.

    Attributes:
        sent: bytes by receiving rank.
        received: bytes from all.
        num_all_gather, num_p2p: collectives of micro-groups, messages from one rank to another.
        max_latency_ms: the longest single wait.
        seconds: by phase (``cut``, ``wire``, ``place``).
        kept_bytes, peak_extra_bytes: see ``SwitchReport``.
    """

    sent: dict[int, int] = {}
    received: int = 0
    num_all_gather: int = 0
    num_p2p: int = 0
    max_latency_ms: float = 0.0
    seconds: dict[str, float] = {}
    kept_bytes: int = 0
    peak_extra_bytes: int = 0


@dataclass
class Switch:
    """One switch, all ranks together.

    Attributes:
        number: from 1, in the order of switches.
        to: the mode.
        seconds: that it took on this rank.
        total_bytes: that went from one device to another.
        num_all_gather: collectives of micro-groups, of the rank with the most.
        num_p2p: messages between two ranks.
        max_latency_ms: the longest single wait of any rank.
        phases: seconds of the slowest rank, by phase.
        device_pairs: ``"source->destination"`` -> bytes.
        kept_bytes, peak_extra_bytes: of the rank with the most.
    """

    number: int
    to: str
    seconds: float
    total_bytes: int = 0
    num_all_gather: int = 0
    num_p2p: int = 0
    max_latency_ms: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    device_pairs: dict[str, int] = field(default_factory=dict)
    kept_bytes: int = 0
    peak_extra_bytes: int = 0


class Profile:
    """Switches since profiling began.

    Args:
        tell: gives a rank's word to all, and returns all ranks' in their order.
    """

    def __init__(self, tell: Callable[[bytes], list[bytes]]) -> None:
        self._tell = tell
        self._switches: list[Switch] = []

    def add(self, number: int, to: str, seconds: float, moved: Moved | None) -> None:
        """Take down a switch; all ranks call it. ``moved`` None: nothing could have."""
        switch = Switch(number, to, seconds)
        if moved is not None:
            found = self._tell(msgspec.msgpack.encode(moved))
            _add_up(switch, [msgspec.msgpack.decode(data, type=Moved) for data in found])
        self._switches.append(switch)

    def report(self, plan: Plan, said: Said) -> dict[str, Any]:
        """Return plain numbers; see ``HybridEngine.get_communication_report``."""
        switches = self._switches
        pairs: dict[str, int] = {}
        phases: dict[str, float] = {}
        for switch in switches:
            for pair, nbytes in switch.device_pairs.items():
                pairs[pair] = pairs.get(pair, 0) + nbytes
            for phase, seconds in switch.phases.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        return {
            "total_bytes": sum(switch.total_bytes for switch in switches),
            "num_all_gather": sum(switch.num_all_gather for switch in switches),
            "num_p2p": sum(switch.num_p2p for switch in switches),
            "max_latency_ms": max((switch.max_latency_ms for switch in switches), default=0.0),
            "device_pairs": pairs,
            "phases": phases,
            "switches": [asdict(switch) for switch in switches],
            "planned_bytes": plan.bytes_moved,
            "generation": {
                "calls": dict(said.calls),
                "sent_bytes": int(said.nbytes),
                "seconds": said.seconds,
                "max_latency_ms": said.longest * 1e3,
            },
            "imbalance": imbalance(plan),
        }


def imbalance(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return what each rank holds of the weights in either life, in bytes of the rollout's dtype, and the fullest
    rank's share over the mean; of generation, also the zeros that its parts are padded with."""
    places = [plan.placement.rollout.index(device) for device in plan.placement.train]
    found: dict[str, dict[str, Any]] = {
        life: {"bytes": [int(n) for n in held], "max_over_mean": float(held.max() / held.mean())}
        for life, held in (("training", plan.held), ("rollout", plan.wanted[places]))
    }
    zeros = zeros_nbytes(plan)
    found["rollout"]["zeros"] = [zeros[place] for place in places]
    return found


def _add_up(switch: Switch, ranks: list[Moved]) -> None:
    for rank, moved in enumerate(ranks):
        for other, nbytes in sorted(moved.sent.items()):
            switch.device_pairs[f"{rank}->{other}"] = nbytes
        for phase, seconds in moved.seconds.items():
            switch.phases[phase] = max(switch.phases.get(phase, 0.0), seconds)
    switch.total_bytes = sum(switch.device_pairs.values())
    switch.num_all_gather = max(moved.num_all_gather for moved in ranks)
    # Each message has two ends.
    switch.num_p2p = sum(moved.num_p2p for moved in ranks) // 2
    switch.max_latency_ms = max(moved.max_latency_ms for moved in ranks)
    switch.kept_bytes = max(moved.kept_bytes for moved in ranks)
    switch.peak_extra_bytes = max(moved.peak_extra_bytes for moved in ranks)


def moved_of(report: SwitchReport, rank: int) -> Moved:
    """Return what a rank's ``SwitchReport`` says, as it is told to the others."""
    return Moved(
        sent={destination: nbytes for (source, destination), nbytes in report.device_pairs.items() if source == rank},
        received=report.received_bytes,
        num_all_gather=report.num_all_gather,
        num_p2p=report.num_p2p,
        max_latency_ms=report.max_latency_ms,
        seconds=dict(report.seconds),
        kept_bytes=report.kept_bytes,
        peak_extra_bytes=report.peak_extra_bytes,
    )
