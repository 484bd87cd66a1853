"""The devices of one node and what lies between each two of them, in the letters of ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.hardware.cpu_list import format_list

LinkKind = Literal["X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS"]

#: Kind -> what it means, nearest first. ``NV`` stands with the number of NVLinks behind it.
LINK_KINDS: Mapping[LinkKind, str] = {
    "X": "the device itself",
    "NV": "NVLink, as many links as the number says",
    "PIX": "one PCIe switch at most",
    "PXB": "several PCIe switches, no host bridge of a CPU",
    "PHB": "a PCIe host bridge, as a rule the CPU",
    "NODE": "PCIe and what joins the host bridges of one NUMA node",
    "SYS": "PCIe and what joins the NUMA nodes",
}
_ORDER = list(LINK_KINDS)
_TEXT = re.compile(r"NV(\d{1,3})|X|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class Link:
    """What lies between two devices.

    Attributes:
        kind: see LINK_KINDS.
        lanes: number of NVLinks; 0 for other kinds.
    """

    kind: LinkKind
    lanes: int = 0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link of a cell such as ``NV18``. Raises ValueError."""
        if text == "SOC":  # what drivers before 384 called it
            return cls("SYS")
        match = _TEXT.fullmatch(text)
        if match is None or (match[1] is not None and int(match[1]) == 0):
            raise ValueError(f"{text!r} is no link; a cell holds X, NV1 to NV999, PIX, PXB, PHB, NODE or SYS")
        if match[1] is not None:
            return cls("NV", int(match[1]))
        kind: Any = text
        return cls(kind)

    def __str__(self) -> str:
        return f"NV{self.lanes}" if self.kind == "NV" else self.kind

    @property
    def distance(self) -> int:
        """Its place in LINK_KINDS: smaller is nearer."""
        return _ORDER.index(self.kind)


SELF = Link("X")


@dataclass(frozen=True)
class MigDevice:
    """A part of a GPU that is a device of its own: its profile (``3g.40gb``) and unique id."""

    profile: str
    uuid: str


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node.

    Attributes:
        label: as the table heads it (GPU0).
        cpus, numa: cores and NUMA nodes that it is near to; empty when not stated.
        own_numa: NUMA nodes that its own memory forms (Grace Hopper).
        name, uuid, memory, pci: where known; memory in bytes.
        mig: its MIG devices; ``mig_mode`` also holds for a GPU that is in that mode and has none.
    """

    label: str
    cpus: tuple[int, ...] = ()
    numa: tuple[int, ...] = ()
    own_numa: tuple[int, ...] = ()
    name: str | None = None
    uuid: str | None = None
    memory: int | None = None
    pci: str | None = None
    mig: tuple[MigDevice, ...] = ()
    mig_mode: bool = False


@dataclass(frozen=True)
class Nic:
    """One network card of a node.

    Attributes:
        label: as the table heads it (NIC0, or the name itself).
        name: of the device (mlx5_0, eth0); the label when no legend says it.
        numa: its NUMA node, or None.
        gbit_s: speed of its port in Gbit/s, or None.
        rdma: whether it is an InfiniBand or RoCE device; None when not known.
        up: whether its port is active; None when not known.
        interfaces: network interfaces on it.
    """

    label: str
    name: str
    numa: int | None = None
    gbit_s: float | None = None
    rdma: bool | None = None
    up: bool | None = None
    interfaces: tuple[str, ...] = ()
    pci: str | None = None


@dataclass(frozen=True)
class NodeGraph:
    """One node: its devices, and the link between each two of their labels (both ways round)."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all devices, GPUs first."""
        return (*(g.label for g in self.gpus), *(n.label for n in self.nics))

    def link(self, a: str, b: str) -> Link | None:
        """Return the link between two labels; None when not known."""
        return SELF if a == b else self.links.get((a, b))

    def islands(self) -> list[tuple[int, ...]]:
        """Return the GPUs (by index) in groups that NVLink joins, directly or by way of others."""
        groups: list[set[int]] = []
        for i, gpu in enumerate(self.gpus):
            joined = [g for g in groups if any(self._nvlink(gpu.label, self.gpus[j].label) for j in g)]
            groups = [g for g in groups if g not in joined] + [set().union(*joined, {i})]
        return sorted(tuple(sorted(group)) for group in groups)

    def nearest(self, gpu: Gpu, nics: Sequence[Nic] | None = None) -> list[tuple[Nic, Link]]:
        """Return the nearest cards to a GPU, all of one distance; nothing when no link is known."""
        known = [(nic, link) for nic in (nics or self.nics) if (link := self.link(gpu.label, nic.label)) is not None]
        least = min((link.distance for _, link in known), default=0)
        return [(nic, link) for nic, link in known if link.distance == least]

    def document(self) -> dict[str, Any]:
        """Return devices, cards and links as plain data, each pair once."""
        labels = self.labels
        pairs = [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :] if (a, b) in self.links]
        return {
            "devices": [_gpu_document(i, gpu) for i, gpu in enumerate(self.gpus)],
            "nics": [_nic_document(nic) for nic in self.nics],
            "links": [{"a": a, "b": b, "type": str(self.links[a, b])} for a, b in pairs],
        }

    def _nvlink(self, a: str, b: str) -> bool:
        link = self.link(a, b)
        return link is not None and link.kind == "NV"


def both_ways(links: Iterable[tuple[str, str, Link]]) -> dict[tuple[str, str], Link]:
    """Return links by pair of labels, each in both directions."""
    return {pair: link for a, b, link in links for pair in ((a, b), (b, a))}


def _gpu_document(index: int, gpu: Gpu) -> dict[str, Any]:
    return {
        "index": index, "label": gpu.label, "name": gpu.name, "uuid": gpu.uuid, "memory": gpu.memory, "pci": gpu.pci,
        "cpus": format_list(gpu.cpus), "numa": list(gpu.numa), "gpu_numa": list(gpu.own_numa),
        "mig_mode": gpu.mig_mode, "mig": [{"profile": m.profile, "uuid": m.uuid} for m in gpu.mig],
    }  # fmt: skip


def _nic_document(nic: Nic) -> dict[str, Any]:
    return {
        "label": nic.label, "name": nic.name, "numa": nic.numa, "gbit_s": nic.gbit_s, "rdma": nic.rdma, "up": nic.up,
        "interfaces": list(nic.interfaces), "pci": nic.pci,
    }  # fmt: skip
