"""What this host gives to processes beside devices: shared memory, locked memory, huge pages, libraries."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.hardware.sysfs import entries, read_text

#: Libraries that transports load, by their file names.
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "libucp.so.0", "libcuda.so.1", "libnccl.so.2")
_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64",
            f"/lib/{os.uname().machine}-linux-gnu", f"/usr/lib/{os.uname().machine}-linux-gnu",
            "/opt/hpcx/ucx/lib", "/opt/ucx/lib")  # fmt: skip


@dataclass(frozen=True)
class HostFacts:
    """One host.

    Attributes:
        shm_total, shm_free: bytes of /dev/shm; None where there is none.
        memlock: bytes that a process may lock; None for no limit.
        hugepages, hugepages_free: pages of ``hugepage_size`` bytes set aside.
        transparent_hugepages: the mode in force, or None.
        libraries: of LIBRARIES -> where it was found, or None.
        rdma_doors: device files of InfiniBand that this process may open, and how many there are.
        peer_memory: whether the module that lets cards read GPU memory is loaded.
    """

    shm_total: int | None
    shm_free: int | None
    memlock: int | None
    hugepages: int = 0
    hugepages_free: int = 0
    hugepage_size: int = 2 << 20
    transparent_hugepages: str | None = None
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    rdma_doors: tuple[int, int] = (0, 0)
    peer_memory: bool = False


def host_facts(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> HostFacts:
    """Look at this host; ``root`` stands in for ``/`` where files are read."""
    shm = root / "dev/shm"
    space = os.statvfs(shm) if shm.is_dir() else None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    meminfo = read_text(root / "proc/meminfo") or ""
    mode = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    doors = [door for door in entries(root / "dev/infiniband") if door.name.startswith("uverbs")]
    return HostFacts(
        shm_total=None if space is None else space.f_blocks * space.f_frsize,
        shm_free=None if space is None else space.f_bavail * space.f_frsize,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        hugepages=_meminfo(meminfo, "HugePages_Total"),
        hugepages_free=_meminfo(meminfo, "HugePages_Free"),
        hugepage_size=_meminfo(meminfo, "Hugepagesize") * 1024 or 2 << 20,
        transparent_hugepages=mode[1] if mode else None,
        libraries=find_libraries(os.environ if env is None else env, root),
        rdma_doors=(sum(os.access(door, os.R_OK | os.W_OK) for door in doors), len(doors)),
        peer_memory=any((root / f"sys/module/{name}").exists() for name in ("nvidia_peermem", "nv_peer_mem")),
    )


def find_libraries(env: Mapping[str, str], root: Path = Path("/")) -> dict[str, str | None]:
    """Return where the loader would find each of LIBRARIES, without loading it."""
    listed = [line for file in entries(root / "etc/ld.so.conf.d") for line in (read_text(file) or "").split("\n")]
    named = [*env.get("LD_LIBRARY_PATH", "").split(":"), *listed, *_FOLDERS]
    folders = [root / name.strip().lstrip("/") for name in dict.fromkeys(named) if name.strip().startswith("/")]
    found: dict[str, str | None] = {}
    for library in LIBRARIES:
        places = (folder / library for folder in folders)
        found[library] = next((str(place) for place in places if place.exists()), None)
    return found


def _meminfo(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0
