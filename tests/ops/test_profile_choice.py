"""What ``--profile auto`` stands for on machines of many kinds, and that it says why."""

import pytest

from rlctl.cli import main
from rlctl.hardware.local import Device, Machine, this_machine
from rlctl.ops.profile_choice import choose_profile
from rlctl.schema.layout import DeviceKind


def machine(kind: DeviceKind, count: int, name: str = "", gigabytes: float = 0) -> Machine:
    devices = tuple(Device(index, name, int(gigabytes * 1e9), f"GPU-{index}") for index in range(count))
    return Machine(64, 1 << 40, kind, devices)


@pytest.mark.parametrize(
    ("found", "nodes", "name", "why"),
    [
        (machine("cpu", 0), "", "cpu-quickstart", "no GPU or NPU"),
        (machine("cuda", 1, "NVIDIA H200", 150), "", "1xH200-colocate", "it uses all devices"),
        (machine("cuda", 8, "NVIDIA H200", 150), "", "1xH200-colocate", "it uses 1 of the 8 devices"),
        (machine("cuda", 8, "NVIDIA H100 80GB HBM3", 85), "", "8xH100-colocate", "it uses all devices"),
        (machine("cuda", 8, "NVIDIA H100 80GB HBM3", 85), "1", "8xH100-colocate", "it uses all devices"),
        (machine("cuda", 8, "NVIDIA H100 80GB HBM3", 85), "2", "16xH100-separate", "on each of 2 nodes"),
        (machine("cuda", 8, "NVIDIA H100 80GB HBM3", 85), "3", "16xH100-separate", "it uses 16 of the 24 devices"),
        (machine("cuda", 8, "NVIDIA H100 80GB HBM3", 85), "8", "64xH100-separate", "it uses all devices"),
        (machine("cuda", 8, "NVIDIA A100-SXM4-80GB", 85), "", "8xA100-hybrid", "it uses all devices"),
        (machine("cuda", 8, "NVIDIA A100-SXM4-40GB", 42), "", "cpu-quickstart", "which no shipped profile is for"),
        (machine("cuda", 2, "NVIDIA GeForce RTX 4090", 25), "", "cpu-quickstart", "which no shipped profile is for"),
        (machine("npu", 8, "Ascend"), "", "8xAscend910B-colocate", "it uses all devices"),
    ],
)
def test_the_profile_that_makes_the_most_of_a_machine(found: Machine, nodes: str, name: str, why: str) -> None:
    choice = choose_profile(found, {"SLURM_JOB_NUM_NODES": nodes})
    assert choice.name == name
    assert why in choice.why
    assert choice.why.startswith(f"found {found.describe()}")


def test_the_command_says_what_it_chose_and_shows_it(capfd: pytest.CaptureFixture[str]) -> None:
    choice = choose_profile()
    assert main(["train", "--profile", "auto", "--dry-run"]) == 0
    assert f"profile {choice.name}: found {this_machine().describe()}" in capfd.readouterr().err
