"""A node drawn as ``nvidia-smi topo -m`` draws it."""

from __future__ import annotations

from rlctl.hardware.cpu_list import format_list
from rlctl.hardware.link_graph import LINK_KINDS, NodeGraph


def topo_table(graph: NodeGraph) -> str:
    """Return the table and its legends; ``parse_topo`` reads it back. Unknown links are shown as ``?``."""
    labels = graph.labels
    titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"] if graph.gpus else []
    rows = [["", *labels, *titles]]
    rows += [[label, *(str(graph.link(label, other) or "?") for other in labels)] for label in labels]
    for gpu, row in zip(graph.gpus, rows[1:], strict=False):
        row += [format_list(numbers) or "N/A" for numbers in (gpu.cpus, gpu.numa, gpu.own_numa)]
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return "\n".join([*lines, *_legend(graph)]) + "\n"


def _legend(graph: NodeGraph) -> list[str]:
    kinds = {link.kind for link in graph.links.values()}
    meanings = [f"  {kind + ('#' if kind == 'NV' else ''):<4} = {text}" for kind, text in LINK_KINDS.items()
                if kind in kinds or kind == "X"]  # fmt: skip
    names = [f"  {nic.label}: {nic.name}" for nic in graph.nics if nic.name != nic.label]
    lines = ["", "Legend:", "", *meanings] if kinds else []
    return [*lines, *(["", "NIC Legend:", "", *names] if names else [])]
