"""What of CUDA handles can be tested without a CUDA device: they are plain data, and devices are found by identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.backends.ipc_topology import connections
from rlctl.sync.colocated import ColocatedSync
from rlctl.sync.device_handle import DeviceHandle, contiguous_blocks, device_index, numbered, open_handle
from rlctl.sync.errors import CorruptedError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.ring_memory import device_slots, slots_on

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


def test_slots_are_where_an_engine_has_its_buckets() -> None:
    memory = slots_on("cpu", 3, 512)
    assert [(slot.device.type, slot.numel()) for slot in memory.slots] == 3 * [("cpu", 512)]
    memory.close()
    with pytest.raises(UnavailableError, match="device meta cannot be handed"):
        slots_on("meta", 2, 256)


def test_memory_that_cannot_be_handed_over_is_said() -> None:
    with pytest.raises(UnavailableError, match="device meta cannot be handed"):
        device_slots(2, 256, "meta")


@contextmanager
def allocator(told: str) -> Iterator[Callable[[], str]]:
    settings = torch._C._accelerator_getAllocatorSettings
    before = settings()
    torch._C._accelerator_setAllocatorSettings(told)
    try:
        yield settings
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False,max_split_size_mb:100000")


def test_expandable_segments_are_off_inside_and_everything_restored() -> None:
    told = "max_split_size_mb:128,expandable_segments:True,garbage_collection_threshold:0.8"
    with allocator(told) as settings:
        for fault in (False, True):
            with suppress(ValueError), contiguous_blocks():
                assert settings() == told.replace("True", "False")
                with contiguous_blocks():
                    assert settings() == told.replace("True", "False")
                if fault:
                    raise ValueError
            assert settings() == told
    with allocator("max_split_size_mb:128") as settings, contiguous_blocks():
        assert settings() == "max_split_size_mb:128"


def test_expandable_segments_are_off_in_a_colocated_sync() -> None:
    class Side:
        replica = "one"

        def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "weight", torch.zeros(1)

        def offload(self) -> None:
            seen.append(settings())

        def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
            seen.append(settings())
            return LoadReport([name for name, _ in stream], [], [])

        def wake(self, tags: Sequence[str]) -> None:
            seen.append(settings())

    seen: list[str] = []
    with allocator("expandable_segments:True") as settings:
        ColocatedSync(Side(), [Side()], timeout=5, on_phase=lambda *_: None, verify="off").sync(1)
        assert seen == 4 * ["expandable_segments:False"]
        assert settings() == "expandable_segments:True"


def test_a_device_is_numbered_where_there_is_one() -> None:
    assert numbered("cpu") == "cpu"
    assert numbered("cuda:3") == "cuda:3"
    expected = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda"
    assert numbered("cuda") == expected


def member(device: str, process: str) -> dict[str, Any]:
    return {"id": process, "node": "n", "device": device, "process": process, "held": [], "senders": 1, "sync": "s",
            "address": "unix:x"}  # fmt: skip


def test_a_process_is_not_sent_handles_of_its_own_memory() -> None:
    both, other = member("GPU-a", "p"), member("GPU-a", "q")
    with pytest.raises(UsageError, match="rollout 0 is in the process of trainer 0"):
        connections("ipc", 1, 1, [both, both])
    with pytest.raises(UsageError, match="rollout 1 is in the process of trainer 0"):
        connections("naive", 1, 2, [both, other, both])
    assert connections("naive", 1, 1, [both, both])[0]["local"]
    assert not connections("ipc", 1, 1, [both, other])[0]["local"]
    assert connections("ipc", 1, 1, [member("cpu", "p"), member("cpu", "p")])[0]["local"]
