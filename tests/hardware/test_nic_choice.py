"""The card of each GPU: nearest first, different ones where possible."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from rlctl.hardware.link_graph import Gpu, Link, Nic, NodeGraph, both_ways
from rlctl.hardware.nic_choice import choose_cards, spread
from rlctl.hardware.topo_dump import parse_topo

DUMPS = Path(__file__).parent / "dumps"


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("h100_8gpu_10nic_legend.txt", [f"mlx5_{i}" for i in range(8)]),
        ("a100_4gpu_4nic_heads.txt", [f"mlx5_{i}" for i in range(4)]),
        ("a100_8gpu_8nic_numa8.txt", [f"mlx5_{i}" for i in range(8)]),
        ("v100_8gpu_4nic_cube.txt", ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1", "mlx5_2", "mlx5_2", "mlx5_3", "mlx5_3"]),
        ("l40s_8gpu_2nic_spaces.txt", ["mlx5_0"] * 4 + ["mlx5_bond_0"] * 4),
        ("vm_4gpu_4nic_phb.txt", [f"mlx5_{i}" for i in range(4)]),
        ("h100_8gpu_no_nics.txt", []),
    ],
)
def test_cards_of_real_nodes(name: str, cards: list[str]) -> None:
    graph = parse_topo((DUMPS / name).read_text())
    assert [nic.name for nic in choose_cards(graph).values()] == cards


def test_a_card_that_is_down_or_carries_no_rdma_is_not_used() -> None:
    nics = (Nic("a", "a", up=False, rdma=True), Nic("b", "b", up=True, rdma=True), Nic("c", "c", up=True, rdma=False))
    links = both_ways([("GPU0", "a", Link("PIX")), ("GPU0", "b", Link("SYS")), ("GPU0", "c", Link("PIX"))])
    assert choose_cards(NodeGraph((Gpu("GPU0"),), nics, links))["GPU0"].name == "b"
    plain = NodeGraph((Gpu("GPU0"), Gpu("GPU1")), nics[2:], links)
    assert {gpu: nic.name for gpu, nic in choose_cards(plain).items()} == {"GPU0": "c"}


@pytest.mark.parametrize("seed", range(20))
def test_the_busiest_card_serves_as_few_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    cards = [f"n{i}" for i in range(rng.randint(1, 3))]
    near = {f"g{i}": rng.sample(cards, rng.randint(1, len(cards))) for i in range(rng.randint(1, 6))}
    chosen = spread(near)
    assert list(chosen) == list(near)
    assert all(chosen[gpu] in near[gpu] for gpu in near)
    best = min(max(Counter(choice).values()) for choice in itertools.product(*near.values()))
    assert max(Counter(chosen.values()).values()) == best, (seed, near)
