"""Network cards and interfaces of this machine, from sysfs."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlctl.hardware.link_graph import Nic
from rlctl.hardware.pci import numa_of
from rlctl.hardware.sysfs import entries, read_int, read_text

_SYS = Path("/sys")


@dataclass(frozen=True)
class Interface:
    """A network interface: its name, IP addresses, whether it is up, and its speed in Gbit/s (None: not stated)."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    gbit_s: float | None = None


def cards(root: Path = _SYS) -> list[Nic]:
    """Return the InfiniBand and RoCE devices, then network interfaces on other cards; virtual ones are left out."""
    rdma = [_rdma(folder) for folder in entries(root / "class/infiniband")]
    taken = {name for nic in rdma for name in nic.interfaces}
    plain = [
        _plain(folder)
        for folder in entries(root / "class/net")
        if folder.name not in taken and (folder / "device").exists()
    ]
    return [*rdma, *plain]


def interfaces() -> list[Interface]:
    """Return the network interfaces of this process's network namespace."""
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        ip = tuple(a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        at = stats.get(name)
        found.append(Interface(name, ip, bool(at and at.isup), at.speed / 1000 if at and at.speed > 0 else None))
    return sorted(found, key=lambda interface: interface.name)


def _rdma(folder: Path) -> Nic:
    device = folder / "device"
    port = next(iter(entries(folder / "ports")), folder / "ports/1")
    rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate") or "")
    state = read_text(port / "state")
    return Nic(
        label=folder.name,
        name=folder.name,
        numa=numa_of(device),
        gbit_s=float(rate[1]) if rate else None,
        rdma=True,
        up=None if state is None else "ACTIVE" in state,
        interfaces=tuple(net.name for net in entries(device / "net")),
        pci=_address(device),
    )


def _plain(folder: Path) -> Nic:
    speed, state = read_int(folder / "speed"), read_text(folder / "operstate")
    device = folder / "device"
    return Nic(
        label=folder.name,
        name=folder.name,
        numa=numa_of(device),
        gbit_s=speed / 1000 if speed is not None and speed > 0 else None,
        rdma=False,
        up={"up": True, "down": False}.get(state or ""),
        interfaces=(folder.name,),
        pci=_address(device),
    )


def _address(device: Path) -> str | None:
    name = device.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None
