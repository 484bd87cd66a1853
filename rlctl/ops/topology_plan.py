"""Where the ranks of a profile run, and who sends which weights to whom over which link. No device is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlctl.errors import RlctlError
from rlctl.hardware.link_graph import Link, NodeGraph
from rlctl.hardware.nic_choice import choose_cards
from rlctl.hardware.placement import Slot, place
from rlctl.hybrid.device_plan import device_placement, rollout_layout, trainer_layout
from rlctl.ops.planned_model import PlannedModel
from rlctl.rollout.traits import delivery_to
from rlctl.schema import Config
from rlctl.schema.layout import LayoutKind
from rlctl.sync.delivery import planned
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.links import LinkKind, LinkModel
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan
from rlctl.sync.traffic import Prediction
from rlctl.sync.traits import Delivery


@dataclass(frozen=True)
class Place:
    """One rank: role, number, node, device of the node, its group (replica) and the card that its device uses."""

    role: str
    rank: int
    node: int
    device: int
    group: int
    group_rank: int
    nic: str | None

    @property
    def name(self) -> str:
        """Role and number, as flows name it."""
        return f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Flow:
    """Weights from one rank to another in one sync.

    Attributes:
        source, target: the ranks.
        nbytes: all slices together.
        link: device (both on one: nothing is sent), node or network.
        path: what it goes over, where known: a link's letters, or the two cards.
    """

    source: Place
    target: Place
    nbytes: int
    link: LinkKind
    path: str | None

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "from": self.source.name, "to": self.target.name, "bytes": self.nbytes, "link": self.link,
            "path": self.path, "from_node": self.source.node, "to_node": self.target.node,
        }  # fmt: skip


@dataclass(frozen=True)
class TopologyPlan:
    """A profile on paper.

    Attributes:
        placement: every rank.
        cards: device of a node -> its card; the same on each node.
        model: what is sent; None when it is not known.
        train, rollout: the two layouts of the weights.
        flows: every pair of ranks that exchange weights.
        delivery: what the transport brings to the rollout engine; ``delivered``: bytes between devices then.
        prediction: seconds of that by the profile's link speeds; None when it states none.
    """

    profile: str
    backend: str
    layout: LayoutKind
    nodes: int
    placement: tuple[Place, ...]
    cards: dict[int, str]
    model: PlannedModel | None = None
    train: ParallelLayout | None = None
    rollout: ParallelLayout | None = None
    flows: tuple[Flow, ...] = ()
    delivery: Delivery = "slices"
    delivered: int = 0
    prediction: Prediction | None = None

    @property
    def moved(self) -> int:
        """Bytes between devices."""
        return sum(flow.nbytes for flow in self.flows if flow.link != "device")

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        model = self.model
        return {
            "profile": self.profile,
            "backend": self.backend,
            "layout": self.layout,
            "model": None if model is None else {"name": model.name, "source": model.source, "bytes": model.nbytes},
            "placement": [asdict(place) for place in self.placement],
            "cards": {str(device): card for device, card in self.cards.items()},
            "flows": [flow.document() for flow in self.flows],
            "bytes_moved": self.moved,
            "delivery": self.delivery,
            "bytes_delivered": self.delivered,
            "predicted": None if self.prediction is None else asdict(self.prediction),
        }


def plan_topology(
    profile: str, config: Config, model: PlannedModel | None, graph: NodeGraph | None = None
) -> TopologyPlan:
    """Lay out a configuration and the weight sync of ``model`` on it.

    Args:
        profile: its name, for people.
        config: the whole configuration.
        model: what is sent; None leaves the flows out.
        graph: a node as it really is, which says the card of each GPU and the link between two; else the cards are
            counted out as the profile says.

    Raises:
        UsageError: the ranks do not fit on the cluster, or the model cannot be cut that way.
    """
    slots = place(config.cluster, config.placement)
    cards = node_cards(config, graph)
    if model is None:
        return TopologyPlan(
            profile, config.sync.backend, config.placement.layout, config.cluster.nodes, _places(slots, cards), cards
        )
    train, rollout = layouts(config, model)
    slots = _moved_least(config, model, slots, train, rollout)
    places = _places(slots, cards)
    where = _placement(config, slots)
    plan = Plan(model.weights, train, rollout, where)
    # On devices that both sides share each rank takes its part where it is.
    separate = config.placement.layout == "separate"
    delivery = delivery_to(config.rollout.engine, config.sync.backend) if separate else "slices"
    carried = plan if delivery == "slices" else planned(delivery, model.weights, train, rollout, where)
    senders = {p.rank: p for p in places if p.role == "trainer"}
    receivers = [p for p in places if p.role in ("rollout", "hybrid")]
    flows = [
        Flow(senders[src], receivers[dst], nbytes, link, _path(senders[src], receivers[dst], link, graph))
        for (src, dst, link), nbytes in plan.traffic.pairs.items()
    ]
    flows.sort(key=lambda flow: (flow.source.rank, flow.target.role, flow.target.rank))
    return TopologyPlan(
        profile, config.sync.backend, config.placement.layout, config.cluster.nodes, places, cards, model, train,
        rollout, tuple(flows), delivery, carried.bytes_moved, _predicted(config, carried),
    )  # fmt: skip


def layouts(config: Config, model: PlannedModel) -> tuple[ParallelLayout, ParallelLayout]:
    """Return how the trainer and the rollout keep the weights."""
    placement = config.placement
    replicas = placement.replicas + placement.hybrid_replicas
    layers = model.spec.layers if model.spec is not None else 0
    if placement.layout == "hybrid":
        train = trainer_layout(placement.trainer_ranks, placement.trainer_tp)
        engine, replicas = config.rollout.engine, max(placement.replicas, 1)
        return train, rollout_layout(engine, replicas, placement.replica_tp, pad=placement.pad)
    return (
        ParallelLayout.fsdp(placement.trainer_ranks // placement.trainer_tp, tp=placement.trainer_tp),
        ParallelLayout.vllm(tp=placement.replica_tp, replicas=max(replicas, 1), layers=layers),
    )


def node_cards(config: Config, graph: NodeGraph | None) -> dict[int, str]:
    """Return device -> name of its card. Nothing on a CPU profile, or where neither graph nor profile knows one."""
    if graph is not None and graph.gpus:
        chosen = choose_cards(graph)
        return {i: chosen[gpu.label].name for i, gpu in enumerate(graph.gpus) if gpu.label in chosen}
    if config.cluster.device == "cpu":
        return {}
    cluster = _cluster(config)
    count = config.cluster.links.nics_per_node
    return {d: f"NIC{cluster.nic(d)}" for d in range(config.cluster.devices_per_node)} if count else {}


def _cluster(config: Config) -> Cluster:
    return Cluster(config.cluster.devices_per_node, max(config.cluster.links.nics_per_node, 1))


def _placement(config: Config, slots: Sequence[Slot]) -> Placement:
    per_node = config.cluster.devices_per_node
    devices: dict[str, list[int]] = defaultdict(list)
    for slot in slots:
        devices[slot.role].append(slot.node * per_node + slot.device)
    return Placement(_cluster(config), tuple(devices["trainer"]), tuple(devices["rollout"] + devices["hybrid"]))


def _moved_least(
    config: Config, model: PlannedModel, slots: list[Slot], train: ParallelLayout, rollout: ParallelLayout
) -> list[Slot]:
    """Return the slots of a hybrid engine with its rollout ranks where most of what they want lies already."""
    if config.placement.layout != "hybrid":
        return slots
    before = _placement(config, slots)
    best = device_placement(model.weights, train, rollout, before.cluster, before.train)
    per_node, devices = config.cluster.devices_per_node, iter(best.rollout)
    return [
        replace(slot, node=(device := next(devices)) // per_node, device=device % per_node)
        if slot.role in ("rollout", "hybrid")
        else slot
        for slot in slots
    ]


def _places(slots: Sequence[Slot], cards: dict[int, str]) -> tuple[Place, ...]:
    return tuple(Place(s.role, s.rank, s.node, s.device, s.group, s.group_rank, cards.get(s.device)) for s in slots)


def _path(source: Place, target: Place, link: LinkKind, graph: NodeGraph | None) -> str | None:
    if link == "network":
        return f"{source.nic} > {target.nic}" if source.nic and target.nic else None
    if link == "device" or graph is None or max(source.device, target.device) >= len(graph.gpus):
        return None
    between: Link | None = graph.link(graph.gpus[source.device].label, graph.gpus[target.device].label)
    return None if between is None else str(between)


def _predicted(config: Config, plan: Plan) -> Prediction | None:
    try:
        links = LinkModel.of_profile(config.cluster.links)
    except RlctlError:
        return None  # the profile states no speed
    return plan.predict(links, bucket_nbytes=config.sync.bucket_size)
