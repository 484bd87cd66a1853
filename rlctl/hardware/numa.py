"""NUMA nodes of this machine, from sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlctl.hardware.cpu_list import parse_list
from rlctl.hardware.sysfs import entries, read_text

_SYS = Path("/sys")


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its number, cores, memory in bytes, and 2 MiB pages set aside and free."""

    index: int
    cpus: tuple[int, ...]
    memory: int
    hugepages: int = 0
    free_hugepages: int = 0


def numa_nodes(root: Path = _SYS) -> list[NumaNode]:
    """Return the NUMA nodes below ``root``; nothing where the kernel shows none."""
    found = []
    for folder in entries(root / "devices/system/node"):
        match = re.fullmatch(r"node(\d+)", folder.name)
        if match is None:
            continue
        pages = folder / "hugepages/hugepages-2048kB"
        found.append(
            NumaNode(
                int(match[1]),
                _cpus(read_text(folder / "cpulist") or ""),
                _memory(read_text(folder / "meminfo") or ""),
                int(read_text(pages / "nr_hugepages") or 0),
                int(read_text(pages / "free_hugepages") or 0),
            )
        )
    return sorted(found, key=lambda node: node.index)


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return parse_list(text)
    except ValueError:
        return ()


def _memory(text: str) -> int:
    match = re.search(r"MemTotal:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else 0
