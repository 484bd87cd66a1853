"""What ``rlctl topology --profile`` shows to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.report.output import Report
from rlctl.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rlctl.ops.topology_plan import TopologyPlan
    from rlctl.ops.topology_summary import PlanSummary

_LINKS = {"device": "within a device (nothing is sent)", "node": "within a node", "network": "between nodes"}
_PAIRS = 16
_SENDERS = 8


def show_plan(report: Report, plan: TopologyPlan, summary: PlanSummary) -> None:
    """Print the placement, and the weight sync where the model is known."""
    report.text(f"# profile {plan.profile}: {plan.layout}, {plan.nodes} node(s)")
    rows = [[r.role, r.group or None, r.ranks, r.node, r.devices, r.cards or None] for r in summary.runs]
    report.table(["role", "group", "ranks", "node", "devices", "card"], rows)
    if plan.cards:
        report.text("")
        report.text("card of each device: " + ", ".join(f"{d} {name}" for d, name in plan.cards.items()))
    if plan.model is not None:
        report.text("")
        _show_sync(report, plan, summary)


def _show_sync(report: Report, plan: TopologyPlan, summary: PlanSummary) -> None:
    model, train, rollout = plan.model, plan.train, plan.rollout
    assert model is not None and train is not None and rollout is not None
    sizes = f"{format_bytes(model.nbytes)} in {len(model.weights)} tensors"
    report.text(f"# weight sync of {model.name} ({sizes}; {model.source})")
    for note in model.notes:
        report.text(f"note: {note}")
    layout = f"FSDP over {train.shard} ranks" + (f" x tensor parallel {train.tp}" if train.tp > 1 else "")
    report.text(f"trainer {layout}; rollout {rollout.replicas} replica(s) of tensor parallel {rollout.tp}")
    rows = [[_LINKS[link], pairs, format_bytes(nbytes)] for link, (pairs, nbytes) in summary.links.items()]
    report.table(["link", "pairs of ranks", "bytes"], rows)
    if plan.nodes > 1:
        _show_nodes(report, summary)
    _show_senders(report, summary)
    if summary.pattern is not None:
        report.text("")
        report.text(f"backend {plan.backend}: {summary.pattern}")
    if plan.delivery == "whole" and rollout.engine_ranks > 1:
        amounts = f"{format_bytes(summary.carried)}, where the slices above are {format_bytes(summary.wanted)}"
        report.text(
            f"  the rollout engine loads whole tensors, so one rank of each replica is sent all of them: {amounts}"
        )
    if plan.prediction is not None and plan.moved:
        seconds = "under 1 ms" if plan.prediction.seconds < 1e-3 else format_duration(plan.prediction.seconds)
        report.text(f"PREDICTION by the profile's link speeds: {seconds}, set by {plan.prediction.bottleneck}")


def _show_nodes(report: Report, summary: PlanSummary) -> None:
    rows = [[f"node {n.source}", f"node {n.target}", n.link, n.pairs, format_bytes(n.nbytes)] for n in summary.nodes]
    report.text("")
    report.table(["from", "to", "link", "pairs", "bytes"], rows[:_PAIRS])
    if len(rows) > _PAIRS:
        report.text(f"and {len(rows) - _PAIRS} more pairs of nodes; --json has every flow")


def _show_senders(report: Report, summary: PlanSummary) -> None:
    if not summary.senders:
        return
    report.text("")
    report.table(
        ["who sends most", "node", "device", "card", "to ranks", "bytes"],
        [[p.name, p.node, p.device, p.nic, count, format_bytes(n)] for p, n, count in summary.senders[:_SENDERS]],
    )
    sent, received = summary.cards_sent, summary.cards_received
    if sent:
        report.text(
            f"{len(sent)} cards send, the busiest {format_bytes(max(sent.values()))}; "
            f"{len(received)} receive, the busiest {format_bytes(max(received.values()))}"
        )
