"""What lies between two PCIe devices, from where sysfs puts them.

The real path of a device names every bridge above it: ``/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/...``. The
classes are those of ``nvidia-smi topo -m``: one switch is an upstream and a downstream port.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.hardware.link_graph import Link
from rlctl.hardware.sysfs import read_int

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2}\.[0-7])")


def sysfs_address(address: str) -> str | None:
    """Return a PCI address as sysfs writes it (``0000:3b:00.0``); None when it is none."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        return None
    return f"{int(match[1], 16):04x}:{match[2].lower()}:{match[3].lower()}"


def pci_folder(address: str, root: Path) -> Path | None:
    """Return the real folder of a device below ``root`` (/sys); None when it is not there."""
    folder = root / "bus/pci/devices" / address
    return folder.resolve() if folder.exists() else None


def numa_of(folder: Path) -> int | None:
    """Return the NUMA node of a device's folder; None where the firmware names none (-1)."""
    node = read_int(folder / "numa_node")
    return node if node is not None and node >= 0 else None


def pci_link(a: Path, b: Path) -> Link:
    """Return what lies between two devices, given their real folders."""
    left, right = _below_bridge(a), _below_bridge(b)
    if not left or not right or left[0] != right[0]:
        here, there = numa_of(a), numa_of(b)
        return Link("NODE") if here is not None and here == there else Link("SYS")
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    if shared == 1:
        return Link("PHB")
    # At most one downstream port between the shared bridge and each of them: one switch, or functions of one card.
    return Link("PIX") if max(len(left), len(right)) - shared <= 2 else Link("PXB")


def _below_bridge(folder: Path) -> list[str]:
    parts = folder.parts
    start = next((i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    return list(parts[start:]) if start is not None else []
