"""How nodes differ, and the report for a bug."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import UsageError
from rlctl.hardware.nccl_conf import conf_variables
from rlctl.ops.environment_report import HIDDEN, environment_report, shown_variables
from rlctl.ops.topology_merge import facts_of, merge


def node(host: str, *, interfaces: tuple[str, ...] = ("lo", "eno1", "bond0"), sockets: str = "bond0") -> dict[str, Any]:
    return {
        "schema": "rlctl.topology/1",
        "host": host,
        "machine": {
            "cores": 96,
            "driver": "570.86",
            "interfaces": [{"name": name, "addresses": [f"10.0.0.{len(host)}"]} for name in interfaces],
        },
        "devices": [
            {"label": "GPU0", "name": "H100", "memory": 80, "uuid": f"GPU-{host}", "cpus": "0-47", "numa": [0]}
        ],
        "nics": [{"name": "mlx5_0", "numa": 0, "gbit_s": 400.0, "rdma": True, "up": True}],
        "links": [{"a": "GPU0", "b": "mlx5_0", "type": "PIX"}],
        "environment": {"variables": {"NCCL_SOCKET_IFNAME": sockets}, "packages": {"torch": "2.11.0"}},
    }


def merged(tmp_path: Path, *documents: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    files = []
    for i, document in enumerate(documents):
        (tmp_path / f"{i}.json").write_text(json.dumps(document))
        files.append(str(tmp_path / f"{i}.json"))
    return {d.what: {v.value: list(v.nodes) for v in d.variants} for d in merge(files).differences}


def test_equal_nodes_do_not_differ(tmp_path: Path) -> None:
    assert merged(tmp_path, node("a"), node("bb"), node("ccc")) == {}


def test_nodes_whose_variables_choose_other_interfaces_are_listed(tmp_path: Path) -> None:
    odd = node("n3", interfaces=("lo", "eno1", "bond0", "bond0.2093"))
    assert merged(tmp_path, node("n1"), node("n2"), odd) == {
        "interfaces that NCCL takes": {"bond0": ["n1", "n2"], "bond0, bond0.2093": ["n3"]}
    }
    none = node("n3", interfaces=("lo", "eth0"))
    assert merged(tmp_path, node("n1"), none) == {"interfaces that NCCL takes": {"bond0": ["n1"], "none": ["n3"]}}


def test_versions_devices_links_and_what_only_one_node_has(tmp_path: Path) -> None:
    odd = copy.deepcopy(node("n2"))
    odd["machine"]["driver"] = "550.1"
    odd["environment"]["packages"] = {"torch": "2.12.0", "ray": "2.50.0"}
    odd["devices"][0] |= {"memory": 94, "mig_mode": True, "cpus": "48-95"}
    odd["links"][0]["type"] = "SYS"
    odd["nics"][0]["up"] = False
    found = merged(tmp_path, node("n1"), odd)
    assert found["driver"] == {"570.86": ["n1"], "550.1": ["n2"]}
    assert found["package torch"] == {"2.11.0": ["n1"], "2.12.0": ["n2"]}
    assert found["package ray"] == {"-": ["n1"], "2.50.0": ["n2"]}
    assert found["link GPU0 - mlx5_0"] == {"PIX": ["n1"], "SYS": ["n2"]}
    assert set(found) >= {"GPUs", "GPU0 affinity", "GPU0 MIG", "card mlx5_0"}


def test_equal_host_names_are_told_apart_by_file(tmp_path: Path) -> None:
    odd = node("n1")
    odd["machine"]["cores"] = 64
    assert merged(tmp_path, node("n1"), odd)["cores"] == {"96": ["0.json"], "64": ["1.json"]}


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(node("a")))
    (tmp_path / "b.json").write_text('{"schema": "rlctl.train/1"}')
    for files in ([], ["a.json"], ["a.json", "b.json"], ["a.json", "absent.json"]):
        with pytest.raises(UsageError):
            merge([str(tmp_path / file) for file in files])


def test_secrets_are_not_reported() -> None:
    env = {
        "NCCL_PSK": "s", "RLCTL_BENCH_TOKEN": "s", "HF_HUB_TOKEN": "s", "NCCL_IB_PKEY": "1", "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "s", "HOME": "/root",
    }  # fmt: skip
    assert shown_variables(env) == {
        "HF_HUB_TOKEN": HIDDEN, "NCCL_DEBUG": "INFO", "NCCL_IB_PKEY": "1", "NCCL_PSK": HIDDEN,
        "RLCTL_BENCH_TOKEN": HIDDEN,
    }  # fmt: skip


def test_variables_of_nccls_files(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# site\nNCCL_DEBUG=WARN\nNCCL_IB_HCA==mlx5_0\nnonsense\n")
    own = tmp_path / "own.conf"
    own.write_text("NCCL_IB_HCA=mlx5\nNCCL_PSK=secret\n")
    env = {"NCCL_CONF_FILE": str(own), "NCCL_DEBUG": "INFO"}
    found = conf_variables(env, tmp_path)
    assert found == {"NCCL_IB_HCA": ("mlx5", str(own)), "NCCL_PSK": ("secret", str(own))}
    assert conf_variables({}, tmp_path)["NCCL_IB_HCA"] == ("=mlx5_0", str(tmp_path / "etc/nccl.conf"))
    report = environment_report(env)
    assert report.from_files["NCCL_PSK"] == (HIDDEN, str(own))
    facts = facts_of({"environment": report.document()})
    assert facts["nccl.conf NCCL_IB_HCA"] == "mlx5"
    assert "secret" not in json.dumps(report.document())
