"""A topology plan in few lines: ranks in runs, flows by pair of nodes, the busiest senders and cards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from rlctl.hardware.cpu_list import format_list
from rlctl.ops.backend_patterns import PATTERNS
from rlctl.ops.topology_plan import Place, TopologyPlan

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class RankRun:
    """Ranks of one role and group on one node: their numbers, devices and cards as lists."""

    role: str
    group: str
    ranks: str
    node: int
    devices: str
    cards: str


@dataclass(frozen=True)
class NodePair:
    """What goes from one node to another: over which link, between how many pairs of ranks, how many bytes."""

    source: int
    target: int
    link: str
    pairs: int
    nbytes: int


@dataclass(frozen=True)
class PlanSummary:
    """A plan for people.

    Attributes:
        runs: the placement, a line for each replica and for each node of the trainer.
        links: link -> (pairs of ranks, bytes).
        nodes: pairs of nodes, the most bytes first.
        senders: ranks that send most: (rank, bytes to other devices, how many ranks it sends to).
        cards_sent, cards_received: (node, card) -> bytes over the network.
        pattern: how the backend carries weights, in words.
        wanted, carried: bytes of the plan's slices, and of what is delivered to the rollout engine.
    """

    runs: list[RankRun]
    links: dict[str, tuple[int, int]]
    nodes: list[NodePair]
    senders: list[tuple[Place, int, int]]
    cards_sent: dict[tuple[int, str], int]
    cards_received: dict[tuple[int, str], int]
    pattern: str | None
    wanted: int
    carried: int


def summarise(plan: TopologyPlan) -> PlanSummary:
    """Return the summary of a plan."""
    pairs: Counter[tuple[int, int, str]] = Counter()
    nbytes: Counter[tuple[int, int, str]] = Counter()
    links: dict[str, tuple[int, int]] = {}
    sent_by: Counter[Place] = Counter()
    targets: Counter[Place] = Counter()
    sent: Counter[tuple[int, str]] = Counter()
    received: Counter[tuple[int, str]] = Counter()
    for flow in plan.flows:
        key = (flow.source.node, flow.target.node, flow.link)
        pairs[key] += 1
        nbytes[key] += flow.nbytes
        before = links.get(flow.link, (0, 0))
        links[flow.link] = (before[0] + 1, before[1] + flow.nbytes)
        if flow.link != "device":
            sent_by[flow.source] += flow.nbytes
            targets[flow.source] += 1
        if flow.link == "network" and flow.source.nic and flow.target.nic:
            sent[flow.source.node, flow.source.nic] += flow.nbytes
            received[flow.target.node, flow.target.nic] += flow.nbytes
    wanted = sum(flow.nbytes for flow in plan.flows)
    return PlanSummary(
        runs=rank_map(plan),
        links=links,
        nodes=[NodePair(*key, pairs[key], amount) for key, amount in _largest(nbytes)],
        senders=[(place, amount, targets[place]) for place, amount in _largest(sent_by)],
        cards_sent=dict(sent),
        cards_received=dict(received),
        pattern=PATTERNS.get(plan.backend),
        wanted=wanted,
        carried=wanted if plan.delivery == "slices" else plan.delivered,
    )


def rank_map(plan: TopologyPlan) -> list[RankRun]:
    """Return the placement, a line for each replica and for each node of the trainer."""
    runs: dict[tuple[str, int, int], list[Place]] = defaultdict(list)
    for place in plan.placement:
        group = place.group if place.role in ("rollout", "hybrid") else -1
        runs[place.role, group, place.node].append(place)
    return [
        RankRun(
            role,
            f"replica {group}" if group >= 0 else "",
            format_list(p.rank for p in places),
            node,
            _in_order([p.device for p in places]),
            _names(dict.fromkeys(p.nic for p in places if p.nic)),
        )
        for (role, group, node), places in runs.items()
    ]


def _largest(counts: Counter[K]) -> list[tuple[K, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _in_order(numbers: list[int]) -> str:
    rising = numbers == sorted(numbers)
    return format_list(numbers) if rising else ",".join(map(str, numbers))


def _names(names: Iterable[str]) -> str:
    found = list(names)
    return f"{found[0]} .. {found[-1]}" if len(found) > 2 else ",".join(found)
