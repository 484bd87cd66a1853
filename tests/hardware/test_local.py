"""Looking at this machine, and at what CUDA_VISIBLE_DEVICES leaves of it."""

import os

import psutil
import pytest

from rlctl.hardware.local import Device, this_machine, visible

DEVICES = [Device(i, "NVIDIA H100 80GB HBM3", 80 << 30, f"GPU-{'abcd'[i]}{i}-0000") for i in range(4)]


def test_this_machine_is_described_without_an_error() -> None:
    machine = this_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert 0 < machine.memory <= psutil.virtual_memory().total
    assert (machine.kind == "cpu") == (not machine.devices)
    text = machine.describe()
    assert f"{machine.cores} cores" in text
    assert "\n" not in text
    if not machine.devices:
        assert "no GPU or NPU" in text


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-c", [2]),
        ("GPU-", []),
        ("0,9,1", [0]),
        ("-1", []),
        ("1,1", [1]),
        ("0,,1", [0]),
        ("x", []),
    ],
)
def test_visible_devices(value: str | None, indices: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [device.index for device in visible(DEVICES, environment)] == indices
