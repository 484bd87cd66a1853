"""NCCL's lists of interfaces and cards, its variables and their values."""

from __future__ import annotations

import re

import pytest

from rlctl.hardware.rules import nccl, network
from rlctl.hardware.rules.name_filter import NameFilter, default_interfaces
from rlctl.hardware.rules.nccl_names import RETIRED, known_names

NAMES = ("lo", "eno1", "bond0", "bond0.2093")


@pytest.mark.parametrize(
    ("value", "taken", "status"),
    [
        ("bond0", ["bond0", "bond0.2093"], "warn"),
        ("=bond0", ["bond0"], "ok"),
        ("^lo,docker", ["eno1", "bond0", "bond0.2093"], "ok"),
        ("eth0", [], "fail"),
        ("^=bond0", ["lo", "eno1", "bond0.2093"], "ok"),
        ("^bond0,lo", ["eno1"], "warn"),
        ("=eno1,bond0", ["eno1", "bond0"], "ok"),
        ("bo", ["bond0", "bond0.2093"], "ok"),
        ("eno1:5000", ["eno1"], "ok"),
        (",,eno1", ["eno1"], "ok"),
        ("^=lo,eno1,bond0,bond0.2093", [], "fail"),
    ],
)
def test_socket_interfaces(value: str, taken: list[str], status: str) -> None:
    chosen = NameFilter.parse(value)
    assert chosen is not None
    assert chosen.choose(NAMES) == taken
    outcome = network.socket_interface({"NCCL_SOCKET_IFNAME": value}, NAMES)
    assert outcome.status == status, outcome
    if status == "fail":
        assert "matches no interface" in outcome.message
    else:
        assert ", ".join(taken) in outcome.message


def test_a_beginning_that_is_a_whole_name_is_pointed_out() -> None:
    outcome = network.socket_interface({"NCCL_SOCKET_IFNAME": "bond0"}, NAMES)
    assert "bond0 also stands for bond0.2093" in outcome.message
    assert outcome.fix == "for exact names write NCCL_SOCKET_IFNAME==bond0"
    cards = [f"mlx5_{i}" for i in range(12)]
    outcome = network.cards({"NCCL_IB_HCA": "mlx5_1"}, cards)
    assert "mlx5_1 also stands for mlx5_10, mlx5_11" in outcome.message
    assert network.cards({"NCCL_IB_HCA": "=mlx5_1:1"}, cards).status == "ok"
    assert network.cards({"NCCL_IB_HCA": "bnxt"}, cards).status == "fail"
    assert network.cards({"NCCL_IB_HCA": "mlx5"}, []).status == "skipped"


def test_what_nccl_takes_when_nothing_is_set() -> None:
    assert default_interfaces(NAMES) == ["eno1", "bond0", "bond0.2093"]
    assert default_interfaces(["lo", "docker0", "ib0", "eth0"]) == ["ib0"]
    assert default_interfaces(["lo", "docker0"]) == ["docker0"]
    assert default_interfaces(["lo"]) == ["lo"]
    assert network.socket_interface({}, NAMES).status == "ok"
    several = network.socket_interface({}, NAMES, nodes=2)
    assert (several.status, "any of eno1, bond0, bond0.2093" in several.message) == ("warn", True)
    assert network.socket_interface({"NCCL_SOCKET_IFNAME": "x"}, NAMES).status == "ok"  # NCCL passes over one character
    assert network.socket_interface({}, None).status == "skipped"


def test_gloo_and_ucx_take_exact_names() -> None:
    def statuses(**env: str) -> list[str]:
        return [o.status for o in network.other_interfaces(env, NAMES, ["mlx5_0"])]

    assert statuses(GLOO_SOCKET_IFNAME="bond") == ["fail"]
    assert statuses(GLOO_SOCKET_IFNAME="bond0,eno1") == ["ok"]
    assert statuses(UCX_NET_DEVICES="mlx5_0:1,eno1") == ["ok"]
    assert statuses(UCX_NET_DEVICES="mlx5_1:1") == ["fail"]
    assert statuses(UCX_NET_DEVICES="all") == statuses() == []


def test_every_known_variable_is_well_formed() -> None:
    for name, known in known_names().items():
        assert re.fullmatch(r"(TORCH_)?NCCL_[A-Z0-9_]+", name)
        assert known.since == "" or re.fullmatch(r"2\.[\d.]+", known.since)
        assert re.fullmatch(r"\*|bool|-?\d+\.\.\d*|[A-Z0-9_|]+", known.values), name
    assert not set(RETIRED) & set(known_names())
    assert {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= set(
        known_names()
    )
    for name, retired in RETIRED.items():
        for word in re.findall(r"\b(?:TORCH_)?NCCL_\w+", retired.instead):
            assert word in known_names(), (name, word)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("NCCL_SOCKET_TIMEOUT", "fail", "has no effect"),
        ("NCCL_TIMEOUT", "fail", "has no effect"),
        ("NCCL_IB_CUDA_SUPPORT", "fail", "removed in NCCL 2.4.0"),
        ("NCCL_ASYNC_ERROR_HANDLING", "warn", "renamed in PyTorch 2.2"),
        ("NCCL_MAX_NCHANNELS", "warn", "deprecated in NCCL 2.17"),
        ("NCCL_IB_TIMOUT", "warn", "is not known"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLE", "warn", "is not known"),
        ("NCCL_ZZZ", "warn", "is not known"),
    ],
)
def test_retired_invented_and_mistyped_variables(name: str, status: str, words: str) -> None:
    (outcome,) = nccl.variable_names({name: "1", "NCCL_DEBUG": "INFO", "PATH": "/bin"})
    assert (outcome.status, words in outcome.message, name in outcome.message) == (status, True, True)
    instead = {
        "NCCL_SOCKET_TIMEOUT": "NCCL_SOCKET_RETRY_CNT",
        "NCCL_TIMEOUT": "init_process_group(timeout=...)",
        "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
        "NCCL_ASYNC_ERROR_HANDLING": "set TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
        "NCCL_IB_TIMOUT": "did you mean NCCL_IB_TIMEOUT?",
        "TORCH_NCCL_ASYNC_ERROR_HANDLE": "did you mean TORCH_NCCL_ASYNC_ERROR_HANDLING?",
        "NCCL_ZZZ": "unless a plugin reads it",
    }[name]
    assert instead in (outcome.fix or "")


def test_names_of_images_plugins_and_a_clean_environment() -> None:
    env = {"NCCL_VERSION": "2.27", "NCCL_FASTRAK_X": "1", "NCCL_P2P_LEVEL": "nvl", "TORCH_NCCL_ENABLE_TIMING": "yes",
           "NCCL_BUFFSIZE": "0x400000"}  # fmt: skip
    assert [o.status for o in nccl.variable_names(env)] == ["ok"]
    assert [o.status for o in nccl.variable_values(env)] == ["ok"]


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("NCCL_IB_TIMEOUT", "32", "a whole number from 0 to 31"),
        ("NCCL_IB_RETRY_CNT", "seven", "a whole number from 0 to 7"),
        ("NCCL_DEBUG", "VERBOSE", "VERSION, WARN, ATTN, INFO, ABORT, TRACE"),
        ("NCCL_P2P_LEVEL", "NVLINK", "LOC, NVL, PIX, PXB, PHB, SYS"),
        ("NCCL_IB_DISABLE", "true", "0 or 1"),
        ("NCCL_BUFFSIZE", "4MB", "a whole number from 1"),
        ("NCCL_IB_TIMEOUT", "0x20", "a whole number from 0 to 31"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4", "a whole number from 0 to 3"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0x1", "a whole number from 0 to 3"),
    ],
)
def test_values_that_a_variable_does_not_take(name: str, value: str, takes: str) -> None:
    outcome = nccl.variable_values({name: value})[0]
    assert (outcome.status, f"{name}={value}" in outcome.message) == ("fail", True)
    assert takes in (outcome.fix or "")


def test_what_switches_transports_off_costs() -> None:
    found = nccl.variable_values({"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0", "NCCL_NVLS_ENABLE": "0"})
    assert [(o.rule, o.status) for o in found] == [("nccl-transports", "warn")] * 2


def test_timeouts() -> None:
    def first(**env: str) -> tuple[str, str]:
        outcome = nccl.timeouts(env, 300.0)[0]
        return outcome.status, outcome.message

    status, message = first()
    assert (status, "after 30.1 s" in message) == ("ok", True)
    status, message = first(NCCL_IB_TIMEOUT="24")
    assert (status, "after 481 s" in message, "300 s of a weight sync" in message) == ("warn", True, True)
    assert first(NCCL_IB_TIMEOUT="0")[0] == "fail"
    assert nccl.timeouts({"NCCL_IB_TIMEOUT": "x"}) == []
    both = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert [o.status for o in nccl.timeouts(both)] == ["ok", "warn", "warn"]
