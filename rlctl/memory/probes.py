"""Reading how much memory a process or a device uses, and the most it used since the last look."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rlctl.errors import UnavailableError

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Written to clear_refs it sets VmHWM back to the resident size (proc(5))."""


class Probe(ABC):
    """Counts bytes of one memory from a baseline on."""

    name: str

    @abstractmethod
    def mark(self) -> None:
        """Take what is used now for the baseline."""

    @abstractmethod
    def now(self) -> int:
        """Return the bytes used now, above the baseline."""

    @abstractmethod
    def peak(self) -> int:
        """Return the most bytes used since the last call, above the baseline."""

    def extras(self) -> dict[str, int]:
        """Return what else is known of this memory, in bytes."""
        return {}


class ResidentProbe(Probe):
    """Resident memory of this process. The kernel keeps the peak, so that no moment is missed.

    Raises UnavailableError where the kernel does not (``/proc/self/clear_refs``).
    """

    name = "resident memory"

    def __init__(self) -> None:
        if not os.access(_CLEAR_REFS, os.W_OK):
            raise UnavailableError("this system does not let a process reset its peak of resident memory (clear_refs)")
        self._base = 0

    def mark(self) -> None:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        self._base = _status("VmRSS")

    def now(self) -> int:
        return _status("VmRSS") - self._base

    def peak(self) -> int:
        found = _status("VmHWM") - self._base
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return found


class CudaProbe(Probe):
    """What torch's allocator holds on one CUDA device, with what it reserves and what the driver says is used.

    Memory that the allocator reserves and does not use is free to this process and taken for every other: an engine
    beside the trainer sees the driver's figure alone.

    Args:
        device: index of the device.
    """

    name = "allocated device memory"

    def __init__(self, device: int = 0) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._base = 0

    def mark(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        self._base = int(self._cuda.memory_allocated(self._device))

    def now(self) -> int:
        return int(self._cuda.memory_allocated(self._device)) - self._base

    def peak(self) -> int:
        self._cuda.synchronize(self._device)
        found = int(self._cuda.max_memory_allocated(self._device)) - self._base
        self._cuda.reset_peak_memory_stats(self._device)
        return found

    def extras(self) -> dict[str, int]:
        free, total = self._cuda.mem_get_info(self._device)
        return {"reserved": int(self._cuda.memory_reserved(self._device)), "driver_used": int(total - free)}


def _status(field: str) -> int:
    with Path("/proc/self/status").open() as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    raise UnavailableError(f"/proc/self/status has no {field}")
