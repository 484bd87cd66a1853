"""What ``rlctl topology --env`` and ``--merge`` show to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlctl.hardware.host import HostFacts
from rlctl.report.output import Report
from rlctl.report.topology_checks import printable
from rlctl.units import format_bytes

if TYPE_CHECKING:
    from rlctl.ops.environment_report import EnvironmentReport
    from rlctl.ops.topology_merge import Merge

_SHOWN = 100
_NODES = 4


def show_environment(report: Report, found: EnvironmentReport) -> None:
    """Print the report, without host name and addresses."""
    report.text("# environment")
    report.table(["what", "version"], [["python", found.python], ["system", found.system], *found.packages.items()])
    report.text("")
    report.table(["host", "value"], _host(found.host))
    report.text("")
    _show_variables(report, found.variables, found.from_files)


def _host(host: HostFacts) -> list[Sequence[object]]:
    shm = (
        "none" if host.shm_total is None else f"{format_bytes(host.shm_total)}, {format_bytes(host.shm_free or 0)} free"
    )
    pages = f"{host.hugepages} x {format_bytes(host.hugepage_size)}, transparent: {host.transparent_hugepages or '-'}"
    return [
        ["shared memory", shm],
        ["locked memory", "unlimited" if host.memlock is None else format_bytes(host.memlock)],
        ["huge pages", pages],
        ["InfiniBand device files", f"{host.rdma_doors[0]} of {host.rdma_doors[1]} usable"],
        ["nvidia_peermem", host.peer_memory],
        *[[name, place] for name, place in host.libraries.items()],
    ]


def _show_variables(report: Report, variables: Mapping[str, str], from_files: Mapping[str, tuple[str, str]]) -> None:
    rows = [[name, printable(value[:_SHOWN]), "environment"] for name, value in variables.items()]
    rows += [[printable(name), printable(value[:_SHOWN]), file] for name, (value, file) in from_files.items()]
    if rows:
        report.table(["variable", "value", "from"], rows)
    else:
        report.text("no variable of NCCL, torch, CUDA, UCX or an engine is set")


def show_merge(report: Report, found: Merge) -> None:
    """Print what differs between nodes, the odd ones named."""
    report.text(f"# {len(found.nodes)} nodes, {found.compared} things compared, {len(found.differences)} differ")
    for difference in found.differences:
        report.text(printable(difference.what))
        for variant in difference.variants:
            nodes = ", ".join(variant.nodes[:_NODES])
            more = f" and {len(variant.nodes) - _NODES} more" if len(variant.nodes) > _NODES else ""
            report.text(printable(f"  {variant.value}  <- {nodes}{more}"))
