"""Pictures of ``rlctl topology``, with the ``plots`` extra: who runs where and who sends to whom, or a node's links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.hardware.link_graph import LINK_KINDS, NodeGraph
from rlctl.report.plots import save_figure

if TYPE_CHECKING:
    from rlctl.ops.topology_plan import TopologyPlan

_COLOURS = {"trainer": "#4c78a8", "rollout": "#f58518", "hybrid": "#e45756", "reward": "#72b7b2"}
_LETTERS = {"trainer": "T", "rollout": "R", "hybrid": "H", "reward": "W"}
_COLUMNS = 4
_NODE_WIDTH, _DEVICES_ABREAST = 4.4, 4
_LABELS = 34


def save_plan_plot(path: Path, plan: TopologyPlan) -> None:
    """Draw nodes with their devices and ranks, and below a map of the bytes from each trainer to each rollout rank.

    Call it only where ``plots.can_plot`` holds. The file (png or svg, by its name) appears whole or not at all.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    devices = 1 + max((place.device for place in plan.placement), default=0)
    rows_of_nodes = _lines(plan.nodes, _COLUMNS)
    tall = _lines(devices, _DEVICES_ABREAST)
    above = rows_of_nodes * (tall + 1.4) * 0.62
    below = 7.5 if plan.flows else 0.0
    figure = Figure(figsize=(12, above + below + 1.2), dpi=100, layout="constrained")
    ratios = [above, below] if plan.flows else [above]
    axes = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_nodes(axes[0], plan, devices)
    roles = [role for role in _COLOURS if any(place.role == role for place in plan.placement)]
    handles = [Patch(color=_COLOURS[role], label=f"{_LETTERS[role]}: {role} rank") for role in roles]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    if plan.flows:
        _draw_flows(figure, axes[1], plan)
    model = f", {plan.model.name} by {plan.backend}" if plan.model is not None else ""
    figure.suptitle(f"{plan.profile} ({plan.layout}){model}")
    save_figure(figure, path)


def _lines(count: int, abreast: int) -> int:
    return -(-count // abreast)


def _draw_nodes(axes: Any, plan: TopologyPlan, devices: int) -> None:
    from matplotlib.patches import Rectangle

    tall = _lines(devices, _DEVICES_ABREAST)
    step = tall + 1.4
    on: dict[tuple[int, int], list[Any]] = {}
    for place in plan.placement:
        on.setdefault((place.node, place.device), []).append(place)
    for node in range(plan.nodes):
        left, top = node % _COLUMNS * (_NODE_WIDTH + 0.3), -(node // _COLUMNS) * step
        axes.add_patch(Rectangle((left, top - tall - 0.2), _NODE_WIDTH, tall + 0.8, fill=False, edgecolor="0.6"))
        axes.text(left + 0.15, top + 0.17, f"node {node}", fontsize=9, va="center")
        for device in range(devices):
            x = left + 0.2 + device % _DEVICES_ABREAST
            y = top - 1 - device // _DEVICES_ABREAST
            places = on.get((node, device), [])
            for i, place in enumerate(places):
                width = 0.9 / len(places)
                axes.add_patch(Rectangle((x + i * width, y + 0.1), width, 0.85, facecolor=_COLOURS[place.role]))
                words = f"{_LETTERS[place.role]}{place.rank}"
                size = 10 - len(words) if len(places) == 1 else 8.5 - len(words) / 2 - len(places) / 2
                axes.text(
                    x + (i + 0.5) * width, y + 0.62, words, ha="center", va="center", fontsize=size, color="white"
                )
            if not places:
                axes.add_patch(Rectangle((x, y + 0.1), 0.9, 0.85, facecolor="0.92"))
            card = plan.cards.get(device)
            if card is not None:
                colour = "white" if places else "0.3"
                axes.text(x + 0.45, y + 0.27, card[:8], ha="center", va="center", fontsize=6, color=colour)
    columns = min(plan.nodes, _COLUMNS)
    axes.set_xlim(-0.1, max(columns, 2) * (_NODE_WIDTH + 0.3))
    axes.set_ylim(0.9 - _lines(plan.nodes, _COLUMNS) * step, 0.8)
    axes.set_aspect("equal")
    axes.axis("off")


def _draw_flows(figure: Any, axes: Any, plan: TopologyPlan) -> None:
    import numpy as np

    senders = [place for place in plan.placement if place.role == "trainer"]
    receivers = [place for place in plan.placement if place.role in ("rollout", "hybrid")]
    row = {place.name: i for i, place in enumerate(senders)}
    column = {place.name: i for i, place in enumerate(receivers)}
    values = np.full((len(senders), len(receivers)), np.nan)
    for flow in plan.flows:
        at = row[flow.source.name], column[flow.target.name]
        values[at] = np.nansum([values[at], flow.nbytes / 2**30])
    image = axes.imshow(values, cmap="Blues", aspect="auto", vmin=0)
    axes.set_facecolor("0.85")
    figure.colorbar(image, ax=axes, label="GiB in one sync")
    _label(axes.yaxis, [f"{_LETTERS[p.role]}{p.rank}" for p in senders])
    _label(axes.xaxis, [f"{_LETTERS[p.role]}{p.rank}" for p in receivers])
    for i in range(1, len(senders)):
        if senders[i].node != senders[i - 1].node:
            axes.axhline(i - 0.5, color="tab:orange", linewidth=1)
    for i in range(1, len(receivers)):
        if receivers[i].node != receivers[i - 1].node:
            axes.axvline(i - 0.5, color="tab:orange", linewidth=1)
    axes.set(xlabel="to rollout rank (lines: nodes; grey: nothing)", ylabel="from trainer rank")
    axes.tick_params(axis="x", labelrotation=90 if len(receivers) > 16 else 0)


def _label(axis: Any, names: list[str]) -> None:
    step = _lines(len(names), _LABELS)
    axis.set_ticks(range(0, len(names), step), labels=names[::step], fontsize=8)


def save_node_plot(path: Path, graph: NodeGraph) -> None:
    """Draw the table of links of one node, coloured by distance. Call it only where ``plots.can_plot`` holds."""
    import numpy as np
    from matplotlib.figure import Figure

    labels = graph.labels
    shown = [*(gpu.label for gpu in graph.gpus), *(nic.name for nic in graph.nics)]
    side = max(4.0, 0.55 * len(labels) + 1.5)
    figure = Figure(figsize=(side + 1.5, side), dpi=100, layout="constrained")
    axes = figure.subplots()
    values = np.full((len(labels), len(labels)), np.nan)
    for i, a in enumerate(labels):
        for j, b in enumerate(labels):
            link = graph.link(a, b)
            if link is not None:
                values[i, j] = link.distance
                colour = "white" if link.distance < len(LINK_KINDS) / 2 else "black"
                axes.text(j, i, str(link), ha="center", va="center", fontsize=8, color=colour)
    axes.imshow(values, cmap="viridis", vmin=0, vmax=len(LINK_KINDS) - 1)
    axes.set_xticks(range(len(labels)), labels=shown, fontsize=8, rotation=90)
    axes.set_yticks(range(len(labels)), labels=shown, fontsize=8)
    axes.set_title("links of a node: dark is near")
    save_figure(figure, path)
