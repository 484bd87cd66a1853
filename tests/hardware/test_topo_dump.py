"""Dumps of ``nvidia-smi topo -m`` as people paste them: read, drawn again, and refused when damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlctl.hardware.cpu_list import format_list, parse_list
from rlctl.hardware.link_graph import Link, NodeGraph, both_ways
from rlctl.hardware.topo_dump import DumpError, parse_topo
from rlctl.hardware.topo_table import topo_table

DUMPS = Path(__file__).parent / "dumps"
EIGHT = [tuple(range(8))]


def read(name: str) -> str:
    return (DUMPS / name).read_bytes().decode()


@pytest.mark.parametrize(
    ("name", "gpus", "cards", "kinds", "islands", "cpus", "numa"),
    [
        ("h100_8gpu_10nic_legend.txt", 8, 10, "NODE NV18 PIX SYS", EIGHT, "48-95,144-191", (1,)),
        ("a100_4gpu_4nic_heads.txt", 4, 4, "NODE NV4 PXB SYS", [(0, 1), (2, 3)], "1,3,5,7,9,11", (1,)),
        ("h200_8gpu_8nic_underlined.txt", 8, 8, "NODE NV18 PIX SYS", EIGHT, "56-111,168-223", (1,)),
        ("a100_8gpu_8nic_numa8.txt", 8, 8, "NODE NV12 PXB SYS", EIGHT, "0-15,128-143", (0,)),
        ("v100_8gpu_4nic_cube.txt", 8, 4, "NV1 NV2 PHB PIX SYS", EIGHT, "20-39,60-79", ()),
        ("p100_4gpu_old_soc.txt", 4, 1, "PHB PIX SYS", [(0,), (1,), (2,), (3,)], "14-27,42-55", ()),
        ("l40s_8gpu_2nic_spaces.txt", 8, 2, "NODE PIX SYS", [(i,) for i in range(8)], "32-63,96-127", (1,)),
        ("one_gpu_one_nic.txt", 1, 1, "PHB", [(0,)], "0-15", (0,)),
        ("one_gpu_alone.txt", 1, 0, "", [(0,)], "0-15", ()),
        ("h100_8gpu_no_nics.txt", 8, 0, "NV18", EIGHT, "52-103,156-207", (1,)),
        ("gh200_4gpu_own_numa.txt", 4, 4, "NV6 PHB SYS", [(0, 1, 2, 3)], "216-287", (3,)),
        ("a100_2gpu_mig.txt", 2, 1, "NV12 PXB SYS", [(0, 1)], "32-63", (1,)),
        ("h100_4gpu_4efa_heads.txt", 4, 4, "NODE NV18 PIX SYS", [(0, 1, 2, 3)], "48-95", (1,)),
        ("pasted_2gpu_quoted.txt", 2, 2, "NODE NV4 PIX", [(0, 1)], "0-23,48-71", (0, 1)),
        ("rtx_2gpu_crlf.txt", 2, 0, "PHB", [(0,), (1,)], "0-31", (0,)),
        ("vm_4gpu_4nic_phb.txt", 4, 4, "NV18 PHB", [(0, 1, 2, 3)], "0-95", ()),
    ],
)
def test_dumps_are_read_and_drawn_again(
    name: str, gpus: int, cards: int, kinds: str, islands: list[tuple[int, ...]], cpus: str, numa: tuple[int, ...]
) -> None:
    graph = parse_topo(read(name), name)
    assert (len(graph.gpus), len(graph.nics)) == (gpus, cards)
    assert sorted({str(link) for link in graph.links.values()}) == kinds.split()
    assert graph.islands() == islands
    assert (format_list(graph.gpus[-1].cpus), graph.gpus[-1].numa) == (cpus, numa)
    drawn = parse_topo(topo_table(graph))
    assert (drawn.links, drawn.nics) == (graph.links, graph.nics)
    assert [(g.label, g.cpus, g.numa, g.own_numa) for g in drawn.gpus] == [
        (g.label, g.cpus, g.numa, g.own_numa) for g in graph.gpus
    ]
    pairs = (gpus + cards) * (gpus + cards - 1) // 2
    assert len(graph.document()["links"]) == pairs


def test_names_come_from_the_legend_the_heads_and_the_list() -> None:
    legend = parse_topo(read("h100_8gpu_10nic_legend.txt"))
    assert [(n.label, n.name) for n in legend.nics[:2]] == [("NIC0", "mlx5_0"), ("NIC1", "mlx5_1")]
    assert legend.nics[8].name == "mlx5_bond_0"
    assert str(legend.link("GPU6", "NIC6")) == "PIX"
    heads = parse_topo(read("a100_4gpu_4nic_heads.txt"))
    assert [n.name for n in heads.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert parse_topo(read("gh200_4gpu_own_numa.txt")).gpus[1].own_numa == (12,)
    mig = parse_topo(read("a100_2gpu_mig.txt"))
    assert [len(g.mig) for g in mig.gpus] == [2, 1]
    assert mig.gpus[1].mig[0].profile == "7g.80gb"
    assert mig.gpus[0].uuid == "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"


def replaced(old: str, new: str, count: int = 1) -> str:
    text = read("h100_8gpu_10nic_legend.txt")
    assert old in text
    return text.replace(old, new, count)


def without_line(number: int) -> str:
    lines = read("h100_8gpu_10nic_legend.txt").split("\n")
    return "\n".join(lines[: number - 1] + lines[number:])


GOOD = "h100_8gpu_10nic_legend.txt"


@pytest.mark.parametrize(
    ("text", "line", "message", "expected"),
    [
        (read("damaged_header.txt"), 1, "the head reads 'CPU Affinit' after NIC0", "names of devices"),
        (replaced("NUMA Affinity", "NUMA"), 1, "the head reads 'NUMA GPU NUMA ID'", "CPU Affinity, NUMA Affinity"),
        (replaced("\tGPU7", "\tGPU6"), 1, "the head names GPU6 twice", "each device once"),
        (without_line(1), 1, "a row of GPU0 before any head", "the line GPU0 GPU1"),
        (without_line(5), 18, "the table ends here without GPU3", "a row for each device"),
        (without_line(19), 18, "the table ends here without NIC9", "a row for each device"),
        (replaced("NIC8\tNODE", "NICX8\tNODE"), 18, "a row of NICX8, which the head does not name", "one of GPU0"),
        (replaced("GPU1\tNV18", "GPU0\tNV18"), 3, "a second row of GPU0 (the first is on line 2)", "one row a device"),
        (replaced("NV18\tNV18", "NV18\tNVX"), 2, "from GPU0 to GPU2: 'NVX' is no link", "a link in each cell"),
        (replaced("GPU0\t X ", "GPU0\tXX"), 2, "from GPU0 to GPU0: 'XX' is no link", "a link in each cell"),
        (replaced("\tNV18\tPIX", "\tPIX"), 2, "from GPU0 to NIC9: '0-47,96-143' is no link", "a link in each cell"),
        (replaced("GPU0\t X \tNV18", "GPU0\tNV18\t X "), 2, "the X of GPU0 is not in its own column", "X under"),
        (
            replaced("NV18\t X ", "SYS\t X "),
            3,
            "GPU1 to GPU0 is SYS here and NV18 on line 2",
            "the same link both ways",
        ),
        (replaced("0-47,96-143", "47-0"), 2, "CPU Affinity: '47-0' is no range", "a list such as"),
        (
            replaced("0-47,96-143\t0\t", "0-47,96-143\t0\t0\t1\t"),
            2,
            "5 values (0-47,96-143, 0, 0, 1 and 1 more)",
            "values for",
        ),
        (replaced("NIC9: mlx5_bond_1", "NIC19: mlx5_9"), 42, "the legend names NIC19", "the whole table"),
        (read(GOOD) + read(GOOD), 43, "a second head (the first is on line 1)", "--merge"),
        (read(GOOD)[:300], 3, "cells for 18 devices", "a link for each of GPU0"),
    ],
)
def test_damaged_dumps_are_refused_with_the_line(text: str, line: int, message: str, expected: str) -> None:
    with pytest.raises(DumpError) as caught:
        parse_topo(text, "topo.txt")
    error = caught.value
    assert error.where == f"topo.txt:{line}", str(error)
    assert message in error.message, str(error)
    assert expected in (error.fix or ""), str(error)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "hello", "No devices were found\n", "NIC0: mlx5_0", "x" * (1 << 20) + "y"]
)
def test_what_is_no_dump_is_refused(text: str) -> None:
    with pytest.raises(DumpError):
        parse_topo(text)


def test_sentences_about_gpus_are_no_tables() -> None:
    said = "GPU0 is slow, see below\n\n" + read(GOOD) + "\nGPU3 was replaced last week\n"
    assert len(parse_topo(said).gpus) == 8


def test_random_nodes_survive_drawing_and_reading() -> None:
    rng = random.Random(611)
    for _ in range(60):
        gpus, cards = rng.randint(1, 8), rng.randint(0, 10)
        text = random_dump(rng, gpus, cards)
        graph = parse_topo(text)
        again = parse_topo(topo_table(graph))
        assert (again.links, len(again.gpus), len(again.nics)) == (graph.links, gpus, cards)


def random_dump(rng: random.Random, gpus: int, cards: int) -> str:
    labels = [*(f"GPU{i}" for i in range(gpus)), *(f"NIC{i}" for i in range(cards))]
    kinds = ["NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
    links = both_ways((a, b, Link.parse(rng.choice(kinds))) for i, a in enumerate(labels) for b in labels[i + 1 :])
    graph = NodeGraph((), (), links)
    gap = rng.choice(["\t", "    "])
    titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: rng.randint(0, 3)]
    lines = [gap + gap.join([*labels, *titles])]
    for label in labels:
        values = [rng.choice(["0-3", "0,2-5", "N/A"]) for _ in titles] if label.startswith("GPU") else []
        lines.append(gap.join([label, *(str(graph.link(label, other)) for other in labels), *values]))
    return "\n".join(lines)


def test_lists_of_cpus() -> None:
    assert parse_list("4,6,8,10") == (4, 6, 8, 10)
    assert parse_list("0-2, 9") == (0, 1, 2, 9)
    assert parse_list("N/A") == parse_list("") == ()
    for bad in ("a", "1-", "-1", "3-1", "1,,2", "0-99999", "1 2"):
        with pytest.raises(ValueError, match=r"neither a number|no range"):
            parse_list(bad)
    rng = random.Random(7)
    for _ in range(50):
        numbers = tuple(sorted(rng.sample(range(300), rng.randint(0, 40))))
        assert parse_list(format_list(numbers)) == numbers
