"""This machine's devices: from a made-up /sys and a made-up driver, and from the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlctl.hardware.nics import cards
from rlctl.hardware.numa import numa_nodes
from rlctl.hardware.nvml_graph import nvml_graph
from rlctl.hardware.pci import pci_link, sysfs_address
from rlctl.hardware.survey import node_graph, survey
from rlctl.hardware.topo_table import topo_table

# Two sockets; below the first a switch of two levels with two GPUs and a card, and a card at a port of its own.
DEVICES = {
    "gpu0": ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0),
    "gpu1": ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:04.0/0000:14:00.0/0000:15:00.0/0000:16:00.0", 0),
    "near": ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:08.0/0000:18:00.0", 0),
    "port": ("pci0000:10/0000:10:02.0/0000:19:00.0", 0),
    "side": ("pci0000:20/0000:20:01.0/0000:21:00.0", 0),
    "far": ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
}
PORTS = {"near": "mlx5_0", "port": "mlx5_1", "far": "mlx5_2"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    sys_ = tmp_path / "sys"
    places = {}
    for name, (place, numa) in DEVICES.items():
        folder = sys_ / "devices" / place
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        (sys_ / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (sys_ / "bus/pci/devices" / folder.name).symlink_to(folder)
        places[name] = folder
    for name, card in PORTS.items():
        (sys_ / "class/infiniband" / card / "ports/1").mkdir(parents=True)
        (sys_ / "class/infiniband" / card / "device").symlink_to(places[name])
        (sys_ / "class/infiniband" / card / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
        (sys_ / "class/infiniband" / card / "ports/1/state").write_text("1: DOWN\n" if name == "far" else "4: ACTIVE\n")
        (places[name] / "net" / f"ib{card[-1]}").mkdir(parents=True)
    for name, target in (("eno1", places["side"]), ("ib0", places["near"]), ("lo", None)):
        (sys_ / "class/net" / name).mkdir(parents=True)
        if target is not None:
            (sys_ / "class/net" / name / "device").symlink_to(target)
    (sys_ / "class/net/eno1/speed").write_text("25000\n")
    (sys_ / "class/net/eno1/operstate").write_text("up\n")
    for index in (0, 1):
        node = sys_ / f"devices/system/node/node{index}"
        (node / "hugepages/hugepages-2048kB").mkdir(parents=True)
        (node / "cpulist").write_text(f"{index * 8}-{index * 8 + 7}\n")
        (node / "meminfo").write_text(f"Node {index} MemTotal:       1024 kB\nNode {index} MemFree: 7 kB\n")
        (node / "hugepages/hugepages-2048kB/nr_hugepages").write_text("3")
    return sys_


def test_cards_with_their_numa_node_and_speed(root: Path) -> None:
    found = {nic.name: nic for nic in cards(root)}
    assert list(found) == ["mlx5_0", "mlx5_1", "mlx5_2", "eno1"]
    assert (found["mlx5_0"].numa, found["mlx5_0"].gbit_s, found["mlx5_0"].up) == (0, 400.0, True)
    assert found["mlx5_0"].interfaces == ("ib0",)
    assert (found["mlx5_2"].numa, found["mlx5_2"].up, found["mlx5_2"].pci) == (1, False, "0000:81:00.0")
    assert (found["eno1"].rdma, found["eno1"].gbit_s, found["eno1"].up) == (False, 25.0, True)


def test_numa_nodes(root: Path) -> None:
    first, second = numa_nodes(root)
    assert (first.index, first.cpus, first.memory) == (0, tuple(range(8)), 1 << 20)
    assert (second.cpus[0], second.hugepages, second.free_hugepages) == (8, 3, 0)
    assert numa_nodes(root / "nowhere") == []


def test_what_lies_between_two_devices(root: Path) -> None:
    def link(a: str, b: str) -> str:
        one, other = (root / "devices" / DEVICES[name][0] for name in (a, b))
        assert pci_link(one, other) == pci_link(other, one)
        return str(pci_link(one, other))

    assert link("gpu0", "near") == "PIX"
    assert link("gpu1", "near") == "PXB"
    assert link("gpu0", "port") == "PHB"
    assert link("gpu0", "side") == "NODE"
    assert link("gpu0", "far") == "SYS"


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("0000:3b:00.1", "0000:3b:00.1"), ("3b:00.0", None), ("", None)],
)
def test_pci_addresses_as_sysfs_writes_them(text: str, address: str | None) -> None:
    assert sysfs_address(text) == address


class Driver(ModuleType):
    """NVML with two GPUs that a switch joins by four links, the second in MIG mode; no GPU is needed to read it."""

    NVML_NVLINK_MAX_LINKS = 6
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class NVMLError(Exception):
        pass

    def __init__(self, *, switch: bool = True, fails: bool = False) -> None:
        super().__init__("pynvml")
        self.switch, self.fails, self.open = switch, fails, 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda h: (
                f"NVIDIA A100 MIG {h[0]}g.{h[1]}gb" if isinstance(h, tuple) else b"NVIDIA A100"
            ),
            "nvmlDeviceGetUUID": lambda h: f"MIG-{h[1]}" if isinstance(h, tuple) else f"GPU-{h}",
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=["00000000:13:00.0", b"00000000:16:00.0"][h]),
            "nvmlDeviceGetMigMode": lambda h: (h, h),
            "nvmlDeviceGetMaxMigDeviceCount": lambda h: 2,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda h, i: (3, 40 + i),
            "nvmlDeviceGetCpuAffinity": lambda h, n: [0xFF, 0x1],
            "nvmlDeviceGetMemoryAffinity": lambda h, n, scope: [1],
            "nvmlDeviceGetNvLinkState": lambda h, port: port < 4,
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, port: 2 if self.switch else 0,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda h, port: SimpleNamespace(
                busId=["00000000:16:00.0", "00000000:13:00.0"][h]
            ),
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 20,
            "nvmlSystemGetDriverVersion": lambda: b"570.86.10",
            "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        }
        if name in answers:
            return answers[name]
        raise AttributeError(name)

    def memory(self, handle: int) -> SimpleNamespace:
        if self.fails:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=80 << 30)


@pytest.mark.parametrize("switch", [True, False])
def test_gpus_and_their_links_by_the_driver(root: Path, monkeypatch: pytest.MonkeyPatch, switch: bool) -> None:
    driver = Driver(switch=switch)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = nvml_graph()
    assert driver.open == 0
    assert (found.driver, found.cuda) == ("570.86.10", "12.8")
    assert str(found.links["GPU0", "GPU1"]) == "NV4"
    first, second = found.gpus
    assert (first.name, first.pci, first.cpus, first.numa) == ("NVIDIA A100", "0000:13:00.0", (*range(8), 64), (0,))
    assert not first.mig_mode
    assert [(m.profile, m.uuid) for m in second.mig] == [("3g.40gb", "MIG-40"), ("3g.41gb", "MIG-41")]
    graph = node_graph(found, root)
    assert [str(graph.link("GPU0", nic.label)) for nic in graph.nics] == ["PIX", "PHB", "SYS", "NODE"]
    assert [str(graph.link("GPU1", nic.label)) for nic in graph.nics] == ["PXB", "PHB", "SYS", "NODE"]
    assert str(graph.link("mlx5_0", "mlx5_1")) == "PHB"
    assert "GPU1    NV4   X" in topo_table(graph)


def test_a_driver_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails=True)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert nvml_graph().notes == ["NVIDIA: gpu is lost"]
    assert driver.open == 0


def test_this_machine_is_surveyed_without_an_error() -> None:
    found = survey()
    assert found.interfaces
    assert found.document()["cores"] == found.machine.cores
    assert any("no NVIDIA GPU" in text for text in found.missing()) == (not found.graph.gpus)
