"""Which network card each GPU should use: the nearest, and another one than its neighbours' where there are enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.hardware.link_graph import Nic, NodeGraph


def carrying_cards(graph: NodeGraph) -> list[Nic]:
    """Return the cards that may carry weights: RDMA devices that are up, or, where none is known, all that are up.

    A dump lists RDMA devices only and does not know their state.
    """
    usable = [nic for nic in graph.nics if nic.up is not False]
    rdma = [nic for nic in usable if nic.rdma]
    return rdma or usable


def choose_cards(graph: NodeGraph) -> dict[str, Nic]:
    """Return GPU label -> card. GPUs without a known link to any card are left out.

    Among the nearest cards of each GPU (all of one distance) as many different ones are used as can be; what must be
    shared is shared evenly. A GPU never goes to a farther card to have one of its own.
    """
    cards = carrying_cards(graph)
    near = {gpu.label: [nic.label for nic, _ in graph.nearest(gpu, cards)] for gpu in graph.gpus} if cards else {}
    near = {label: names for label, names in near.items() if names}
    by_label = {nic.label: nic for nic in cards}
    chosen = spread(near)
    return {gpu: by_label[card] for gpu, card in chosen.items()}


def spread(near: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return a choice of one card for each GPU out of ``near`` whose busiest card serves as few GPUs as can be.

    Every card takes one GPU by a maximum matching (augmenting paths), then each a second one, and so on.
    """
    chosen: dict[str, str] = {}
    left = [gpu for gpu in near if near[gpu]]
    while left:
        taken: dict[str, str] = {}
        for gpu in left:
            _seat(gpu, near, taken, set())
        chosen.update({gpu: card for card, gpu in taken.items()})
        left = [gpu for gpu in left if gpu not in chosen]
    return {gpu: chosen[gpu] for gpu in near if gpu in chosen}


def _seat(gpu: str, near: Mapping[str, Sequence[str]], taken: dict[str, str], seen: set[str]) -> bool:
    # Free cards first, in order: nobody is moved without need.
    for card in sorted(near[gpu], key=lambda card: card in taken):
        if card not in seen:
            seen.add(card)
            if card not in taken or _seat(taken[card], near, taken, seen):
                taken[card] = gpu
                return True
    return False
