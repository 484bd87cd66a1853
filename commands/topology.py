"""``rlctl topology``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.report import Report

EXAMPLES = {
    "rlctl topology": "what this machine has, and how its devices are joined",
    "rlctl topology --from topo.txt": "the same of a saved `nvidia-smi topo -m`",
    "rlctl topology --from -": "of another node: ssh node17 nvidia-smi topo -m | rlctl topology --from -",
}


def main(
    report: Report,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="FILE|-", help="Read what `nvidia-smi topo -m` printed.")
    ] = None,
    require_gpus: Annotated[
        bool, typer.Option("--require-gpus", help="Exit 3 when this machine shows no GPU or NPU.")
    ] = False,
) -> None:
    """Show the devices, links and network cards a run would use.

    Nothing here needs a GPU: what is missing is said. See docs/topology.md.
    """
    from rlctl.ops.topology_sources import here, read_dump, require_devices
    from rlctl.report.topology import show_machine, show_node

    if from_ is not None:
        graph = read_dump(from_)
        report.document({"source": from_, **graph.document()})
        show_node(report, graph)
        return
    found = here()
    if require_gpus:
        require_devices(found)
    report.document({"source": "this machine", "machine": found.document(), **found.graph.document()})
    show_machine(report, found)
