"""Rules on how ranks and cards lie on the links of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlctl.hardware.link_graph import Gpu, NodeGraph
from rlctl.hardware.nic_choice import carrying_cards, choose_cards, spread
from rlctl.hardware.placement import Slot
from rlctl.hardware.rules.name_filter import NameFilter
from rlctl.hardware.rules.network import CARDS
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn


def tensor_parallel_links(graph: NodeGraph, slots: Sequence[Slot]) -> list[Outcome]:
    """Check that each tensor-parallel group lies within one NVLink island, or at least one NUMA node.

    Args:
        graph: the node, its GPUs in the order in which the run numbers them.
        slots: every rank.
    """
    rule = "tensor-parallel-links"
    groups: dict[tuple[str, int], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.role, slot.group), []).append(slot)
    wide = {key: group for key, group in groups.items() if len(group) > 1}
    if not wide:
        return [ok(rule, "no tensor parallelism: nothing to lie together")]
    found: list[Outcome] = []
    said: set[tuple[str, str]] = set()
    for (role, number), group in wide.items():
        outcome = _group(rule, graph, role, number, group)
        # Replicas on equal nodes have equal faults: one of each is enough.
        if outcome is not None and (outcome.status, outcome.fix or "") not in said:
            said.add((outcome.status, outcome.fix or ""))
            found.append(outcome)
    return found or [ok(rule, f"{len(wide)} tensor-parallel groups lie within NVLink islands or NUMA nodes")]


def _group(rule: str, graph: NodeGraph, role: str, number: int, group: Sequence[Slot]) -> Outcome | None:
    name = f"{'trainer group' if role == 'trainer' else f'{role} replica'} {number}"
    if len({slot.node for slot in group}) > 1:
        fix = "a tensor-parallel size that divides the devices of a node"
        return fail(rule, f"{name} (tp {len(group)}) spans nodes, and tensor parallelism talks in every layer", fix)
    devices = sorted(slot.device for slot in group)
    if devices[-1] >= len(graph.gpus):
        return fail(rule, f"{name} uses device {devices[-1]}, and {len(graph.gpus)} GPUs are seen",
                    "a profile whose cluster.devices_per_node is what the node shows")  # fmt: skip
    gpus = [graph.gpus[i] for i in devices]
    where = f"{name} on {', '.join(gpu.label for gpu in gpus)}"
    islands = graph.islands()
    joined = [island for island in islands if set(devices) & set(island)]
    largest = max(map(len, islands))
    if len(joined) > 1 and largest > 1:
        parts = " | ".join(
            ",".join(graph.gpus[i].label for i in sorted(set(devices) & set(island))) for island in joined
        )
        if largest >= len(group):
            fix = f"order the GPUs by CUDA_VISIBLE_DEVICES so that a group lies in one island: {_islands(graph)}"
            return fail(rule, f"{where} spans NVLink islands ({parts})", fix)
        fix = f"a tensor-parallel size of at most {largest}"
        return warn(rule, f"{where} spans NVLink islands ({parts}); none has {len(group)} GPUs", fix)
    if len(joined) > 1:
        return _without_nvlink(rule, where, gpus)
    apart = [(a.label, b.label) for i, a in enumerate(gpus) for b in gpus[i + 1 :] if not _nvlink(graph, a, b)]
    if largest > 1 and apart:
        fix = "groups of GPUs with direct links, by CUDA_VISIBLE_DEVICES"
        return warn(rule, f"{where}: no NVLink joins {apart[0][0]} and {apart[0][1]} directly", fix)
    return None


def _without_nvlink(rule: str, where: str, gpus: Sequence[Gpu]) -> Outcome | None:
    nodes = {gpu.numa for gpu in gpus if gpu.numa}
    if len(nodes) < 2:
        return None
    return warn(
        rule,
        f"{where} spans NUMA nodes {', '.join(sorted(str(n[0]) for n in nodes))} without NVLink",
        "a tensor-parallel size that fits on the GPUs of one NUMA node, or another order by CUDA_VISIBLE_DEVICES",
    )


def _nvlink(graph: NodeGraph, a: Gpu, b: Gpu) -> bool:
    link = graph.link(a.label, b.label)
    return link is not None and link.kind == "NV"


def _islands(graph: NodeGraph) -> str:
    numbers = [[graph.gpus[i].label.removeprefix("GPU") for i in island] for island in graph.islands()]
    return " ".join("{" + ",".join(island) + "}" for island in numbers)


def nearest_cards(graph: NodeGraph, env: Mapping[str, str]) -> list[Outcome]:
    """Check that each GPU's nearest card may be used, and that no card serves two GPUs while another is idle.

    NCCL_IB_HCA may leave cards out; NCCL then takes the nearest of the rest.
    """
    if not graph.gpus:
        return [skipped("nearest-card", "no GPU is known")]
    cards = carrying_cards(graph)
    if not cards or not choose_cards(graph):
        return [skipped("nearest-card", "no network card with a known link to a GPU")]
    chosen = NameFilter.parse(env.get(CARDS, ""))
    allowed = [card for card in cards if chosen is None or chosen.matches(card.name)]
    if not allowed:
        return [skipped("nearest-card", f"{CARDS} leaves no card")]  # its own rule fails
    left, far = [], []
    for gpu in graph.gpus:
        best, mine = graph.nearest(gpu, cards), graph.nearest(gpu, allowed)
        if best and mine and mine[0][1].distance > best[0][1].distance:
            left.append(f"{gpu.label} {mine[0][0].name} ({mine[0][1]}), not {best[0][0].name} ({best[0][1]})")
        elif mine and mine[0][1].kind == "SYS":
            far.append(f"{gpu.label} {mine[0][0].name}")
    found = []
    if left:
        message = f"{CARDS}={env[CARDS][:60]} leaves out nearer cards: {'; '.join(left)}"
        found.append(warn("nearest-card", message, f"let {CARDS} name them too"))
    if far:
        message = f"no card on the NUMA node of these GPUs, the nearest are across (SYS): {', '.join(far)}"
        found.append(warn("nearest-card", message, "use cards of both sockets, or GPUs of the card's socket only"))
    found = found or [ok("nearest-card", _listed(graph))]
    return [*found, *_shared(graph, [card.label for card in allowed])]


def _listed(graph: NodeGraph) -> str:
    pairs = [f"{gpu} {nic.name} ({graph.link(gpu, nic.label)})" for gpu, nic in choose_cards(graph).items()]
    return "each GPU has its nearest card: " + ", ".join(pairs)


def _shared(graph: NodeGraph, allowed: Sequence[str]) -> list[Outcome]:
    by_label = {nic.label: nic for nic in graph.nics}

    def loads(labels: Sequence[str]) -> Counter[str]:
        nics = [by_label[label] for label in labels]
        near = {gpu.label: [nic.label for nic, _ in graph.nearest(gpu, nics)] for gpu in graph.gpus}
        return Counter(spread(near).values())

    now, free = loads(allowed), loads([card.label for card in carrying_cards(graph)])
    if not now or max(now.values()) == 1:
        return [ok("shared-card", f"{len(now)} cards, each for one GPU")]
    card, count = now.most_common(1)[0]
    name = by_label[card].name
    if free and max(free.values()) < count:
        message = f"{name} serves {count} GPUs, and with all cards none would serve more than {max(free.values())}"
        return [warn("shared-card", message, f"let {CARDS} name more cards")]
    return [ok("shared-card", f"{len(now)} cards for {sum(now.values())} GPUs: {name} serves {count}, as it must")]
