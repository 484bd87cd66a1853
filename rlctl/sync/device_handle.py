"""Handles of CUDA memory as plain data, so that they travel in a message and not in a pickle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.errors import CorruptedError

_Storage: Any = torch.UntypedStorage  # torch does not say what it has
# The allocator's settings have no public name yet.
_settings: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")  # noqa: SLF001
_set_settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True):
    """What torch needs to map another process's allocation, and where it is.

    Attributes:
        uuid: of the device; processes number their devices differently.
        handle, nbytes, offset: of the allocation and the storage in it.
        counter, counter_offset: torch's shared count of who still uses it: one handle is opened once.
        event, wait: to be waited for before the first use.
    """

    uuid: str
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    wait: bool

    @classmethod
    def of(cls, memory: torch.Tensor) -> DeviceHandle:
        """Return a handle of a whole uint8 CUDA allocation (of ``contiguous_blocks``)."""
        storage: Any = memory.untyped_storage()
        index, *rest = storage._share_cuda_()  # what torch.multiprocessing calls
        return cls(_uuids()[index], *rest)


def open_handle(handle: DeviceHandle, nbytes: int) -> torch.Tensor:
    """Map the memory of ``handle``, ``nbytes`` of it, as a uint8 tensor; it stays mapped as long as the tensor lives.

    Raises UnavailableError when this process does not see the device, CorruptedError when it is too small.
    """
    if handle.nbytes < nbytes:
        raise CorruptedError(f"device memory of {handle.nbytes} bytes, less than the {nbytes} announced")
    index = device_index(handle.uuid, _uuids())
    torch.cuda.init()
    storage: Any = _Storage._new_shared_cuda(  # noqa: SLF001 - what torch.multiprocessing calls
        index, handle.handle, handle.nbytes, handle.offset, handle.counter, handle.counter_offset, handle.event,
        handle.wait,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage, 0, [nbytes], [1])


def device_index(uuid: str, visible: Sequence[str]) -> int:
    """Return the number of a device among those that this process sees."""
    if uuid not in visible:
        raise UnavailableError(
            f"the weights are on device {uuid}, which this process does not see ({', '.join(visible) or 'none'})",
            fix="put the replica on the same device (CUDA_VISIBLE_DEVICES), or use sync.backend=nccl",
        )
    return visible.index(uuid)


@contextmanager
def contiguous_blocks() -> Iterator[None]:
    """Have CUDA memory allocated inside in blocks that plain handles can be made of, which expandable segments are not:
    sharing those takes rights that containers do not give, and engines that give memory back while they sleep
    (vLLM's, say) map it by themselves."""
    before = _settings()
    inside = _EXPANDABLE.sub("expandable_segments:False", before)
    if inside == before:
        yield
        return
    _set_settings(inside)  # all of them: those that are left out may fall back to their defaults
    try:
        yield
    finally:
        _set_settings(before)


def numbered(device: str) -> str:
    """Return a device with its number: ``cuda`` is the current device of this thread, and of another it may be
    another."""
    current = torch.accelerator.current_accelerator()
    if current is None or device != current.type:
        return device
    return f"{device}:{torch.accelerator.current_device_index()}"


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
