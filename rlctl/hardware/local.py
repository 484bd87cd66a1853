"""What this machine has: cores, memory, and devices as their driver reports them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.hardware.link_graph import Gpu
from rlctl.hardware.visible_devices import parse_visible, resolve_visible
from rlctl.schema.layout import DeviceKind
from rlctl.units import format_bytes

_CGROUP_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Device:
    """One accelerator: its index in the driver, name, memory in bytes and unique id."""

    index: int
    name: str
    memory: int
    uuid: str


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        cores: cores that this process may run on.
        memory: bytes of host memory that it may use.
        kind: kind of the devices; "cpu" when there are none.
        devices: the accelerators that this process may see.
        notes: what could not be found out and why.
    """

    cores: int
    memory: int
    kind: DeviceKind
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line for a message."""
        host = f"{self.cores} cores, {format_bytes(self.memory)} of memory"
        if not self.devices:
            return f"{host}, no GPU or NPU" + (f" ({'; '.join(self.notes)})" if self.notes else "")
        names = sorted({device.name for device in self.devices})
        smallest = min(device.memory for device in self.devices)
        return f"{len(self.devices)} x {', '.join(names)} ({format_bytes(smallest)}), {host}"


def this_machine() -> Machine:
    """Look at this machine. An absent driver is a note, never an error."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    notes: list[str] = []
    devices = _nvidia(notes)
    kind: DeviceKind = "cuda"
    if not devices:
        devices, kind = _ascend(), "npu"
    return Machine(cores, _memory(), kind if devices else "cpu", tuple(devices), tuple(notes))


def _memory() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_MEMORY:
        file = Path(path)
        if file.is_file():
            text = file.read_text().strip()
            return min(total, int(text)) if text.isdigit() else total
    return total


def _nvidia(notes: list[str]) -> list[Device]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.append(f"NVIDIA: {str(error).lower()}")
        return []
    try:
        found = [_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        notes.append(f"NVIDIA: {str(error).lower()}")
        return []
    finally:
        pynvml.nvmlShutdown()
    seen = visible(found, os.environ)
    if len(seen) != len(found):
        notes.append(f"CUDA_VISIBLE_DEVICES shows {len(seen)} of {len(found)} devices")
    return seen


def _device(pynvml: object, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)  # type: ignore[attr-defined]
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total  # type: ignore[attr-defined]
    return Device(index, _text(name), int(memory), _text(uuid))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def visible(devices: list[Device], environment: Mapping[str, str]) -> list[Device]:
    """Return the devices that ``CUDA_VISIBLE_DEVICES`` lets a process see, in its order; all when it is not set."""
    shown = parse_visible(environment.get("CUDA_VISIBLE_DEVICES"))
    by_id = {device.uuid: device for device in devices}
    gpus = [Gpu(label=device.uuid, uuid=device.uuid) for device in devices]
    return [by_id[uuid] for uuid in resolve_visible(shown, gpus) if uuid in by_id]


def _ascend() -> list[Device]:
    """Return Ascend NPUs by their device files; their names and memory need the vendor's own tools."""
    files = sorted(Path("/dev").glob("davinci[0-9]*"), key=lambda p: int(p.name.removeprefix("davinci")))
    return [Device(index, "Ascend", 0, file.name) for index, file in enumerate(files)]
