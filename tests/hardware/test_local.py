"""Looking at this machine, and at what CUDA_VISIBLE_DEVICES leaves of it."""

import os
import sys
from types import ModuleType, SimpleNamespace

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
        ("1,1", []),
        ("0,GPU-c", [0]),
        ("0,,1", [0]),
        ("x", []),
    ],
)
def test_visible_devices(value: str | None, indices: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [device.index for device in visible(DEVICES, environment)] == indices


def nvml(names: list[str | bytes], *, fails: bool = False) -> ModuleType:
    """Return a driver library with these devices, as the bindings show it: no GPU is needed to read the answers."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def memory(handle: int) -> SimpleNamespace:
        if fails:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=80 << 30)

    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.nvmlInit = module.nvmlShutdown = lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = lambda: len(names)  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda handle: names[handle]  # type: ignore[attr-defined]
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"  # type: ignore[attr-defined]
    module.nvmlDeviceGetMemoryInfo = memory  # type: ignore[attr-defined]
    return module


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA H200", b"NVIDIA H200"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = this_machine()
    assert (machine.kind, [d.name for d in machine.devices]) == ("cuda", ["NVIDIA H200"] * 2)
    assert machine.describe().startswith("2 x NVIDIA H200 (80 GiB), ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine = this_machine()
    assert [d.index for d in machine.devices] == [1]
    assert machine.notes == ("CUDA_VISIBLE_DEVICES shows 1 of 2 devices",)


def test_a_driver_that_fails_half_way_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA H200"], fails=True))
    machine = this_machine()
    assert machine.kind == "cpu"
    assert "no GPU or NPU (NVIDIA: gpu is lost)" in machine.describe()
