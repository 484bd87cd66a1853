"""What ``rlctl topology`` shows to people."""

from __future__ import annotations

from rlctl.hardware.cpu_list import format_list
from rlctl.hardware.link_graph import Gpu, Nic, NodeGraph
from rlctl.hardware.survey import Survey
from rlctl.hardware.topo_table import topo_table
from rlctl.report.output import Report
from rlctl.units import format_bytes

_GPU_HEADS = ["GPU", "name", "memory", "PCI", "unique id", "MIG"]
_CARD_HEADS = ["card", "kind", "state", "Gbit/s", "NUMA", "interfaces", "PCI"]


def show_machine(report: Report, found: Survey) -> None:
    """Print this machine: cores and memory, NUMA nodes, devices, and what is not there."""
    machine = found.machine
    report.text(f"{machine.cores} cores, {format_bytes(machine.memory)} of memory, {len(found.numa)} NUMA node(s)")
    if len(found.numa) > 1:
        rows = [[n.index, format_list(n.cpus), format_bytes(n.memory)] for n in found.numa]
        report.table(["NUMA", "cpus", "memory"], rows)
    if found.driver:
        report.text(f"NVIDIA driver {found.driver}, CUDA up to {found.cuda or 'unknown'}")
    for device in machine.devices if machine.kind == "npu" else ():
        report.text(f"NPU{device.index}  {device.name}")
    report.text("")
    show_node(report, found.graph)
    for absent in found.missing():
        report.text(f"missing: {absent}")


def show_node(report: Report, graph: NodeGraph) -> None:
    """Print the devices of a node and the table of their links."""
    if any(gpu.name for gpu in graph.gpus):
        report.table(_GPU_HEADS, [_gpu(gpu) for gpu in graph.gpus])
        report.text("")
    if graph.labels:
        report.text(topo_table(graph))
    if any(nic.rdma is not None for nic in graph.nics):
        report.text("")
        report.table(_CARD_HEADS, [_nic(nic) for nic in graph.nics])


def _gpu(gpu: Gpu) -> list[object]:
    parts = ", ".join(part.profile for part in gpu.mig) or ("on, no devices" if gpu.mig_mode else None)
    return [gpu.label, gpu.name, None if gpu.memory is None else format_bytes(gpu.memory), gpu.pci, gpu.uuid, parts]


def _nic(nic: Nic) -> list[object]:
    kind = "RDMA" if nic.rdma else "Ethernet"
    return [nic.name, kind, _state(nic.up), nic.gbit_s, nic.numa, ",".join(nic.interfaces), nic.pci]


def _state(up: bool | None) -> str | None:
    return None if up is None else "up" if up else "down"
