"""``rlctl topology``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.errors import UsageError
from rlctl.report import Report

EXAMPLES = {
    "rlctl topology": "what this machine has, and how its devices are joined",
    "rlctl topology --from topo.txt": "the same of a saved `nvidia-smi topo -m`",
    "rlctl topology --from -": "of another node: ssh node17 nvidia-smi topo -m | rlctl topology --from -",
    "rlctl topology --profile 64xH100-separate --model kimi-k2 --backend nixl": "who sends what to whom in a sync",
    "rlctl topology --profile 8xH100-colocate --from topo.txt": "on the links and cards of that node",
    "rlctl topology --check --profile 8xH100-colocate": "is this node set up for that run? exit 4 if not",
}


def main(
    report: Report,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the configuration.")
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
    require_gpus: Annotated[
        bool, typer.Option("--require-gpus", help="Exit 3 when this machine shows no GPU or NPU.")
    ] = False,
) -> None:
    """Show the devices, links and network cards a run would use.

    Nothing here needs a GPU: what is missing is said. See docs/topology.md.
    """
    from rlctl.ops.topology_checks import require_passed
    from rlctl.ops.topology_view import Asked, look
    from rlctl.report.topology import show_machine, show_node
    from rlctl.report.topology_checks import show_checks
    from rlctl.report.topology_plan import show_plan

    given = [name for name, value in (("--model", model), ("--backend", backend), ("KEY=VALUE", words)) if value]
    if profile is None and given:
        raise UsageError(f"{', '.join(given)} without --profile", fix="name the hardware that it is to run on")
    if child_devices is not None and not check:
        raise UsageError("--child-devices is for --check", where="--child-devices")
    view = look(
        Asked(from_, profile, model, backend, tuple(words or ()), check, child_devices, require_gpus=require_gpus)
    )
    for note in view.notes:
        report.line(f"note: {note}")
    report.document(view.document())
    if view.plan is not None:
        show_plan(report, view.plan, view.summary())
    elif view.machine is not None:
        show_machine(report, view.machine)
    elif view.graph is not None:
        show_node(report, view.graph)
    if check:
        report.text("")
        show_checks(report, view.checks)
        require_passed(view.checks)
