"""All that can be seen of this machine: cores, NUMA nodes, GPUs, network cards, and what lies between them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.hardware.cpu_list import format_list
from rlctl.hardware.link_graph import NodeGraph, both_ways
from rlctl.hardware.local import Machine, this_machine
from rlctl.hardware.nics import Interface, cards, interfaces
from rlctl.hardware.numa import NumaNode, numa_nodes
from rlctl.hardware.nvml_graph import NvmlGraph, nvml_graph
from rlctl.hardware.pci import pci_folder, pci_link

_SYS = Path("/sys")


@dataclass(frozen=True)
class Survey:
    """This machine.

    Attributes:
        machine: what a process may use of it.
        numa: its NUMA nodes.
        graph: devices and links, those included that CUDA_VISIBLE_DEVICES hides.
        interfaces: network interfaces.
        driver, cuda: of NVIDIA, or None.
    """

    machine: Machine
    numa: tuple[NumaNode, ...]
    graph: NodeGraph
    interfaces: tuple[Interface, ...]
    driver: str | None = None
    cuda: str | None = None

    def missing(self) -> list[str]:
        """Return what is not here, or could not be found out, in words."""
        absent = list(dict.fromkeys([*self.graph.notes, *self.machine.notes]))
        if not self.graph.gpus and self.machine.kind != "npu":
            absent.insert(0, "no NVIDIA GPU is visible here")
        if not any(nic.rdma for nic in self.graph.nics):
            absent.append("no InfiniBand or RoCE device in /sys/class/infiniband")
        return absent

    def document(self) -> dict[str, Any]:
        """Return the machine as plain data, without its graph."""
        return {
            "cores": self.machine.cores,
            "memory": self.machine.memory,
            "kind": self.machine.kind,
            "architecture": platform.machine(),
            "kernel": platform.release(),
            "driver": self.driver,
            "cuda": self.cuda,
            "numa": [{"index": n.index, "cpus": format_list(n.cpus), "memory": n.memory} for n in self.numa],
            "interfaces": [
                {"name": i.name, "addresses": list(i.addresses), "up": i.up, "gbit_s": i.gbit_s}
                for i in self.interfaces
            ],
            "missing": self.missing(),
        }


def survey(root: Path = _SYS) -> Survey:
    """Look at this machine; ``root`` stands in for /sys. Nothing that is absent is an error."""
    nvml = nvml_graph()
    return Survey(
        this_machine(), tuple(numa_nodes(root)), node_graph(nvml, root), tuple(interfaces()), nvml.driver, nvml.cuda
    )


def node_graph(nvml: NvmlGraph, root: Path = _SYS) -> NodeGraph:
    """Return the graph of the GPUs that NVML told of and the cards that sysfs shows.

    Links that involve a card follow from the PCIe tree; a card outside of it (a virtual function of a container) has
    none.
    """
    nics = cards(root)
    places = [*((gpu.label, gpu.pci) for gpu in nvml.gpus), *((nic.label, nic.pci) for nic in nics)]
    folders = {label: folder for label, pci in places if pci and (folder := pci_folder(pci, root)) is not None}
    names = [nic.label for nic in nics if nic.label in folders]
    links = both_ways(
        (a, b, pci_link(folders[a], folders[b])) for b in names for a in folders if a != b and (a not in names or a < b)
    )
    return NodeGraph(tuple(nvml.gpus), tuple(nics), {**nvml.links, **links}, tuple(nvml.notes))
