"""NVIDIA GPUs of this machine and what lies between them, by NVML. No driver, or none of this function: a note."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.hardware.link_graph import Gpu, Link, LinkKind, MigDevice, both_ways
from rlctl.hardware.pci import sysfs_address

_ANCESTORS: tuple[LinkKind, ...] = ("PIX", "PIX", "PXB", "PHB", "NODE", "SYS")  # by NVML's level over ten
_WORD = 64


@dataclass
class NvmlGraph:
    """What NVML said.

    Attributes:
        gpus: in the driver's order, whatever CUDA_VISIBLE_DEVICES shows of them.
        links: by pair of labels.
        driver, cuda: version of the driver, and the newest CUDA that it serves.
        notes: why there is nothing.
    """

    gpus: list[Gpu] = field(default_factory=list)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    driver: str | None = None
    cuda: str | None = None
    notes: list[str] = field(default_factory=list)


def nvml_graph() -> NvmlGraph:
    """Ask the driver for its GPUs and their links."""
    import pynvml

    found = NvmlGraph()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        found.notes.append(f"NVIDIA: {str(error).lower()}")
        return found
    try:
        _fill(found, pynvml)
    except pynvml.NVMLError as error:
        return NvmlGraph(notes=[f"NVIDIA: {str(error).lower()}"])
    finally:
        pynvml.nvmlShutdown()
    return found


def _fill(found: NvmlGraph, nvml: Any) -> None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found.gpus = [_gpu(nvml, i, handle) for i, handle in enumerate(handles)]
    driver, cuda = _ask(nvml, "nvmlSystemGetDriverVersion"), _ask(nvml, "nvmlSystemGetCudaDriverVersion")
    found.driver = None if driver is None else _text(driver)
    found.cuda = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
    ports = [_nvlinks(nvml, handle) for handle in handles]
    links = []
    for a, gpu in enumerate(found.gpus):
        for b in range(a + 1, len(handles)):
            lanes = _lanes(found.gpus[b], ports[a], ports[b])
            level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
            if lanes:
                links.append((gpu.label, found.gpus[b].label, Link("NV", lanes)))
            elif level is not None and 0 <= level // 10 < len(_ANCESTORS):
                links.append((gpu.label, found.gpus[b].label, Link(_ANCESTORS[level // 10])))
    found.links = both_ways(links)


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    own = _ask(nvml, "nvmlDeviceGetNumaNodeId", handle)
    return Gpu(
        label=f"GPU{index}",
        cpus=_set_bits(_ask(nvml, "nvmlDeviceGetCpuAffinity", handle, _WORD)),
        numa=_set_bits(_ask(nvml, "nvmlDeviceGetMemoryAffinity", handle, 1, 0)),
        own_numa=() if own is None else (int(own),),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci=None if pci is None else sysfs_address(_text(pci.busId)),
        mig=tuple(_mig(nvml, handle)) if mode is not None and mode[0] else (),
        mig_mode=mode is not None and bool(mode[0]),
    )


def _mig(nvml: Any, handle: Any) -> list[MigDevice]:
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = None if part is None else _ask(nvml, "nvmlDeviceGetUUID", part)
        if uuid is not None:
            profile = re.search(r"MIG (\S+)", _text(_ask(nvml, "nvmlDeviceGetName", part) or ""))
            found.append(MigDevice(profile[1] if profile else "", _text(uuid)))
    return found


def _nvlinks(nvml: Any, handle: Any) -> list[str]:
    """Return where each active NVLink ends: a PCI address, or "switch"."""
    ends = []
    for port in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, "nvmlDeviceGetNvLinkState", handle, port):
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, port)
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, port)
        address = None if remote is None else sysfs_address(_text(remote.busId))
        ends.append("switch" if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH else address or "")
    return ends


def _lanes(b: Gpu, from_a: list[str], from_b: list[str]) -> int:
    """Return the NVLinks between two GPUs: direct ones, or as many as both have into the switches."""
    direct = from_a.count(b.pci) if b.pci else 0
    return direct or min(from_a.count("switch"), from_b.count("switch"))


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the answer of one function; None when the driver or the device has no such thing."""
    call: Callable[..., Any] | None = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _set_bits(words: Any) -> tuple[int, ...]:
    if words is None:
        return ()
    return tuple(i * _WORD + bit for i, word in enumerate(words) for bit in range(_WORD) if int(word) >> bit & 1)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
