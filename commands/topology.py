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
    require_gpus: Annotated[
        bool, typer.Option("--require-gpus", help="Exit 3 when this machine shows no GPU or NPU.")
    ] = False,
) -> None:
    """Show the devices, links and network cards a run would use.

    Nothing here needs a GPU: what is missing is said. See docs/topology.md.
    """
    from rlctl.ops.topology_sources import here, plan_sources, read_dump, require_devices, topology_document
    from rlctl.ops.topology_summary import summarise
    from rlctl.report.topology import show_machine, show_node
    from rlctl.report.topology_plan import show_plan

    given = [name for name, value in (("--model", model), ("--backend", backend), ("KEY=VALUE", words)) if value]
    if profile is None and given:
        raise UsageError(f"{', '.join(given)} without --profile", fix="name the hardware that it is to run on")
    graph = read_dump(from_) if from_ is not None else None
    if require_gpus:
        require_devices(here())
    if profile is not None:
        plan, notes = plan_sources(profile, model=model, backend=backend, overrides=words or (), graph=graph)
        for note in notes:
            report.line(f"note: {note}")
        report.document(topology_document(from_ or "the profile", graph, plan))
        show_plan(report, plan, summarise(plan))
        return
    if graph is not None:
        report.document(topology_document(from_ or "", graph))
        show_node(report, graph)
        return
    found = here()
    report.document({**topology_document("this machine", found.graph), "machine": found.document()})
    show_machine(report, found)
