"""The sync bench: real processes, checked figures, honest failures."""

from __future__ import annotations

import json

import pytest
import torch

from rlctl.cli.leaf import run
from rlctl.errors import UnavailableError, UsageError
from rlctl.ops.sync_bench_choice import choose_backends
from rlctl.ops.sync_bench_workload import equal_tensors, make, model_tensors, mutate, total_bytes
from rlctl.sync.registry import CHECKPOINT_ENGINES


def bits(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in weights.items()}


def test_weights_are_the_same_everywhere_and_change_alike() -> None:
    metas = equal_tensors(100_001, 7)
    assert total_bytes(metas) == 100_000
    one, other = make(metas, 5), make(metas, 5)
    assert bits(one) == bits(other)
    assert not any(t.view(torch.uint8).any() for t in make(metas, None).values())
    for change in (1.0, 0.02):
        before = bits(one)
        for weights in (one, other):
            mutate(weights, step=3, change=change)
        assert bits(one) == bits(other)
        changed = sum(
            a != b
            for name in before
            for a, b in zip(memoryview(before[name]).cast("H"), memoryview(bits(one)[name]).cast("H"), strict=True)
        )
        assert changed == 50_000 if change == 1.0 else 900 < changed <= 1000
    with pytest.raises(UsageError, match="too few"):
        equal_tensors(10, 6)


def test_a_preset_is_the_model() -> None:
    metas = model_tensors("qwen2.5-0.5b")
    assert (len(metas), total_bytes(metas)) == (290, 988_065_536)


def test_backends_are_chosen_from_the_registry() -> None:
    chosen, absent = choose_backends(["all"])
    assert "gloo" in chosen
    assert not {a.backend for a in absent} & set(chosen)
    assert all(a.reason and a.remedy for a in absent)
    assert {"nccl", "hccl"} <= {a.backend for a in absent}
    with pytest.raises(UsageError, match="did you mean 'gloo'"):
        choose_backends(["glo"])
    with pytest.raises(UnavailableError) as caught:
        choose_backends(["gloo", "hccl"])
    assert caught.value.fix


def test_the_command_measures(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "gloo", "--size", "4MiB", "--tensors", "9", "--bucket", "1MiB", "--iters", "3"]
    arguments += ["--raw", "--delta", "--json"]
    assert run("sync-bench", arguments) == 0
    document = json.loads(capfd.readouterr().out)
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == ["full", "raw", "delta"]
    assert [row["wrong"] for row in rows.values()] == [0, 0, 0]
    assert document["weights_bytes"] == 4 << 20
    assert 0 <= rows["full"]["bytes_moved"] - (4 << 20) < 256 * 64  # tensors and pieces of them are aligned
    assert rows["delta"]["bytes_moved"] < 0.1 * (4 << 20)  # 2 % of the elements, at most 4 bytes each and headers
    for row in rows.values():
        assert 0 < row["time_s"]["p50"] <= row["time_s"]["p99"]
        assert row["cpu_s"] > 0
        assert row["cold_s"] > 0
        assert row["limit_ratio"]["wall"] == pytest.approx(document["limit"]["time_s"]["p50"] / row["time_s"]["p50"])
    assert 0 < rows["full"]["stall_s"] <= rows["full"]["time_s"]["p99"]
    assert set(rows["full"]["phases"]) == {"gather", "pack", "register", "wire", "unpack", "load"}
    assert rows["full"]["raw_ratio"]["cpu"] == pytest.approx(rows["raw"]["cpu_s"] / rows["full"]["cpu_s"])
    assert document["unavailable"] == []


def test_a_backend_that_cannot_run_has_a_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    absent = next(a for a in choose_backends(["all"])[1])
    assert run("sync-bench", ["--backend", absent.backend]) == 3
    assert absent.remedy in capfd.readouterr().err
    assert "gloo" in CHECKPOINT_ENGINES.names()


@pytest.mark.parametrize(
    "arguments",
    [["--size", "lots"], ["--bucket", "0"], ["--change", "200%"], ["--change", "some"], ["--csv", "--json"],
     ["--size", "900TiB"]],
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sync-bench", ["--backend", "gloo", *arguments]) == 2
    assert capfd.readouterr().err
