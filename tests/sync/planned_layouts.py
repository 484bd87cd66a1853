"""A model of equal parts, and nodes to lay it out on."""

from __future__ import annotations

from rlctl.sync.placement import Cluster
from rlctl.sync.weights import Weight

NODES = Cluster(devices_per_node=4, nics_per_node=2)


def uniform_model(layers: int = 4) -> list[Weight]:
    """Only column-parallel tensors: a tensor-parallel rank holds exactly 1/tp of the model."""
    from rlctl.sync.weights import Split

    return [
        Weight(f"layers.{i}.{n}", (64, width), "BF16", Split("even", 0, 64), layer=i)
        for i in range(layers)
        for n, width in (("a", 8), ("b", 3))
    ]
