"""What of CUDA handles can be tested without a CUDA device: they are plain data, and devices are found by identity."""

from __future__ import annotations

import msgspec
import pytest
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.device_handle import DeviceHandle, contiguous_blocks, device_index, open_handle
from rlctl.sync.errors import CorruptedError
from rlctl.sync.ring_memory import device_slots

HANDLE = DeviceHandle("GPU-b", b"\x00\xffhandle", 1 << 20, 512, b"counter", 8, b"event", True)


def test_a_handle_travels_as_plain_data() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(HANDLE), type=DeviceHandle) == HANDLE


def test_the_device_is_found_by_identity_not_by_number() -> None:
    assert device_index("GPU-b", ["GPU-c", "GPU-b"]) == 1
    with pytest.raises(UnavailableError, match=r"GPU-b, which this process does not see \(GPU-a, GPU-c\)"):
        device_index("GPU-b", ["GPU-a", "GPU-c"])


def test_too_small_an_allocation_is_refused_before_it_is_opened() -> None:
    with pytest.raises(CorruptedError, match="less than the 2097152 announced"):
        open_handle(HANDLE, 2 << 20)


def test_memory_that_cannot_be_handed_over_is_said() -> None:
    with pytest.raises(UnavailableError, match="device meta cannot be handed"):
        device_slots(2, 256, "meta")


def test_expandable_segments_are_off_inside_and_restored() -> None:
    settings = torch._C._accelerator_getAllocatorSettings
    before = settings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with contiguous_blocks():
            assert "expandable_segments:False" in settings()
        assert "expandable_segments:True" in settings()
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
