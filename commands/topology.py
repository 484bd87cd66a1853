"""``rlctl topology``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import CheckError, UsageError
from rlctl.report import Report
from rlctl.report.plots import require_plot

if TYPE_CHECKING:
    from rlctl.ops.topology_view import View

EXAMPLES = {
    "rlctl topology": "what this machine has, and how its devices are joined",
    "rlctl topology --from topo.txt": "the same of a saved `nvidia-smi topo -m`",
    "rlctl topology --from -": "of another node: ssh node17 nvidia-smi topo -m | rlctl topology --from -",
    "rlctl topology --profile 64xH100-separate --model kimi-k2 --backend nixl": "who sends what to whom in a sync",
    "rlctl topology --profile 8xH100-colocate --from topo.txt": "on the links and cards of that node",
    "rlctl topology --check --profile 8xH100-colocate": "is this node set up for that run? exit 4 if not",
    "rlctl topology --env": "the report to paste into a bug",
    "rlctl topology --merge node1.json node2.json": "how nodes differ, from their --env --json",
}


def main(
    report: Report,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE|FILE]...", help="Keys of the configuration; with --merge, files."),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="FILE|-", help="Read what `nvidia-smi topo -m` printed.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="auto|NAME|FILE", help="Lay out a run on this hardware.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PRESET|PATH", help="Model to send: preset, folder, config.json, safetensors."),
    ] = None,
    backend: Annotated[str | None, typer.Option("--backend", metavar="NAME", help="Checkpoint engine.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check how node and run are set up; exit 4 on a fault.")
    ] = False,
    child_devices: Annotated[
        str | None,
        typer.Option(
            "--child-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of an engine's process, to be checked too."
        ),
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Add versions, limits and variables: the report for a bug.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="List how nodes differ: FILEs are their --env --json; --check: exit 4.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg|png", help="Draw ranks and flows, or a node's links.")
    ] = None,
    require_gpus: Annotated[
        bool, typer.Option("--require-gpus", help="Exit 3 when this machine shows no GPU or NPU.")
    ] = False,
) -> None:
    """Show the devices, links and network cards a run would use.

    Nothing here needs a GPU: what is missing is said. See docs/topology.md.
    """
    from rlctl.ops.topology_view import Asked, look

    given = [name for name, value in (("--model", model), ("--backend", backend), ("KEY=VALUE", words)) if value]
    if merge:
        others = {"--from": from_, "--profile": profile, "--model": model, "--backend": backend, "--env": env,
                  "--plot": plot, "--child-devices": child_devices}  # fmt: skip
        _refuse("--merge", [name for name, value in others.items() if value])
        _merge(report, words or (), check)
        return
    if profile is None and given:
        raise UsageError(f"{', '.join(given)} without --profile", fix="name the hardware that it is to run on")
    if child_devices is not None and not check:
        raise UsageError("--child-devices is for --check", where="--child-devices")
    if env and from_ is not None:
        raise UsageError("--env is of this machine, --from of another", where="--env", fix="leave one out")
    require_plot(plot)
    asked = Asked(from_, profile, model, backend, tuple(words or ()), check, child_devices, require_gpus, env)
    _show(report, look(asked), plot, check)


def _show(report: Report, view: View, plot: Path | None, check: bool) -> None:
    from rlctl.ops.topology_checks import require_passed
    from rlctl.report.topology import show_machine, show_node
    from rlctl.report.topology_checks import show_checks
    from rlctl.report.topology_environment import show_environment
    from rlctl.report.topology_plan import show_plan

    for note in view.notes:
        report.line(f"note: {note}")
    report.document(view.document())
    if view.plan is not None:
        show_plan(report, view.plan, view.summary())
    elif view.machine is not None:
        show_machine(report, view.machine)
    elif view.graph is not None:
        show_node(report, view.graph)
    if view.environment is not None:
        report.text("")
        show_environment(report, view.environment)
    if plot is not None:
        _plot(report, view, plot)
    if check:
        report.text("")
        show_checks(report, view.checks)
        require_passed(view.checks)


def _plot(report: Report, view: View, plot: Path) -> None:
    from rlctl.report.topology_plot import save_node_plot, save_plan_plot

    if view.plan is not None:
        save_plan_plot(plot, view.plan)
    elif view.graph is not None:
        save_node_plot(plot, view.graph)
    else:
        raise UsageError("there is nothing to draw: no device here", where="--plot", fix="give --profile or --from")
    report.line(f"drawn: {plot}")


def _merge(report: Report, files: Sequence[str], check: bool) -> None:
    from rlctl.ops.topology_merge import merge
    from rlctl.report.topology_environment import show_merge

    found = merge(files)
    report.document(found.document())
    show_merge(report, found)
    if check and found.differences:
        raise CheckError(f"{len(found.nodes)} nodes differ in {len(found.differences)} things")


def _refuse(option: str, others: Sequence[str]) -> None:
    if others:
        raise UsageError(f"{option} does not go with {', '.join(others)}", where=option)
