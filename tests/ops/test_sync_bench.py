"""The sync bench: real processes, checked figures, honest failures."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rlctl.cli.leaf import run
from rlctl.errors import CheckError, RlctlError, UnavailableError, UsageError
from rlctl.ops.sync_bench import BenchResult, Failed, check, run_bench
from rlctl.ops.sync_bench_choice import choose_backends
from rlctl.ops.sync_bench_contest import Sample, SyncContestant
from rlctl.ops.sync_bench_options import BenchOptions, Host, Squad, groups, squads
from rlctl.ops.sync_bench_rows import GIB, Comparison, Row, compare, limit_of, row_of, rows_csv
from rlctl.ops.sync_bench_turns import Entry
from rlctl.ops.sync_bench_workload import equal_tensors, make, model_tensors, mutate, total_bytes
from rlctl.process import run_token
from rlctl.report.sync_plot import save_sync_plot
from rlctl.sync.engine import EngineOptions
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.registry import CHECKPOINT_ENGINES
from tests.waiting import gone


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
        assert all(side > 0 for side in row["cpu_by_side"].values())
        assert row["cold_s"] > 0
        assert row["limit_ratio"]["wall"] == pytest.approx(document["limit"]["time_s"]["p50"] / row["time_s"]["p50"])
    assert 0 < rows["full"]["stall_s"] <= rows["full"]["time_s"]["p99"]
    assert set(rows["full"]["phases"]) == {"gather", "pack", "register", "wire", "unpack", "load"}
    assert rows["full"]["raw_ratio"]["cpu"] == pytest.approx(rows["raw"]["cpu_s"] / rows["full"]["cpu_s"])
    assert document["unavailable"] == []
    assert 0 <= document["limit"]["verify_cpu_s_per_gib"] < 1


def test_wrong_bits_are_seen_and_a_lost_process_costs_only_its_own_figures() -> None:
    options = EngineOptions(bucket_size=1 << 20, timeout=20.0, token=run_token())
    contestant = SyncContestant("gloo", equal_tensors(3 << 20, 3), 1, 1, options)
    entry = Entry("gloo", "full", 1 << 20, contestant)
    try:
        entry.open()
        assert not entry.error
        contestant.begin(1)
        assert contestant.end()[1] == 3  # nothing was sent
        entry.rep(2)
        assert [s.wrong for s in entry.samples] == [0]
        (worker,) = contestant.rollouts.members
        assert isinstance(worker, MemberProcess)
        os.kill(worker.pid, signal.SIGKILL)
        assert gone(worker.pid)
        entry.rep(3)
        assert "rollout 0" in entry.error
        assert "SIGKILL" in entry.error
        assert len(entry.samples) == 1
    finally:
        contestant.close()


def sample(seconds: float, wrong: int = 0) -> Sample:
    return Sample(
        seconds, (seconds / 4, seconds / 4), GIB, stall_s=seconds, phases={"wire": seconds}, extra_bytes=7, wrong=wrong
    )


def row(seconds: float, *, wrong: int = 0, raw: Row | None = None) -> Row:
    warm = [sample(seconds * k) for k in (3, 1, 1, 1, 2)]
    limit = limit_of([sample(0.1)], GIB)
    reps = [sample(9.0, wrong), *warm]
    return row_of("gloo", "full", 64, reps, warm, nbytes=GIB, limit=limit, raw=raw)


def test_rows() -> None:
    found = row(0.5, wrong=2, raw=row(0.4))
    assert found.time_s.p50 == 0.5
    assert 1.4 < found.time_s.p99 < 1.5
    assert (found.cold_s, found.gib_per_s, found.wrong, found.extra_bytes, found.stall_s) == (9.0, 2.0, 2, 7, 0.5)
    assert found.limit_ratio.wall == pytest.approx(0.2)
    assert found.raw_ratio is not None
    assert found.raw_ratio.cpu == pytest.approx(0.8)
    header, line = rows_csv([found]).splitlines()
    values = dict(zip(header.split(","), line.split(","), strict=True))
    assert (values["backend"], values["time_s.p50"], values["phases.wire"]) == ("gloo", "0.5", "0.5")


def test_one_row_without_a_nested_field_leaves_no_column_of_its_own() -> None:
    header, *_ = rows_csv([row(0.5, raw=row(0.4)), row(0.4)]).splitlines()
    assert "raw_ratio.wall" in header.split(",")
    assert "raw_ratio" not in header.split(",")


def test_what_the_memory_does_not_hold_at_once_goes_in_groups() -> None:
    options = BenchOptions(["gloo", "other"], equal_tensors(GIB, 4), delta=True, raw=True)
    assert squads(options) == [
        Squad("gloo", 64 << 20, raw=True),
        Squad("gloo", 64 << 20, delta=True),
        Squad("other", 64 << 20),
        Squad("other", 64 << 20, delta=True),
    ]
    assert groups(options, [Host(100 * GIB, 1, 1)]) == [squads(options)]
    assert [len(part) for part in groups(options, [Host(11 * GIB, 1, 1)])] == [2, 2]
    assert [s for part in groups(options, [Host(7 * GIB, 1, 1)]) for s in part] == squads(options)
    with pytest.raises(UsageError, match="gloo needs"):
        groups(options, [Host(3 * GIB, 1, 1)])
    # Two hosts: the smaller decides.
    hosts = [Host(100 * GIB, 1, 0), Host(5 * GIB, 0, 1, copies=False, name="other")]
    assert [len(part) for part in groups(options, hosts)] == [2, 2]
    with pytest.raises(UsageError, match="free on other"):
        groups(options, [hosts[0], Host(GIB, 0, 1, copies=False, name="other")])


def test_ways_of_a_backend_are_rows_of_their_own() -> None:
    options = BenchOptions(["ipc"], equal_tensors(GIB, 4), delta=True)
    assert [squad.variant for squad in squads(options)] == ["mapped", "ring", "views", "delta"]
    options = BenchOptions(["ipc"], equal_tensors(GIB, 4), extras={"ipc": {"way": "ring"}})
    assert [squad.variant for squad in squads(options)] == ["ring"]


def test_comparison_with_an_earlier_result() -> None:
    old = {"schema": "rlctl.sync-bench/1", "rows": [asdict(row(0.25))]}
    assert [c.speed for c in compare([row(0.5)], old, where="old.json")] == [0.5]
    with pytest.raises(UsageError, match="no backend, variant and bucket size"):
        compare([row(0.5)], {**old, "rows": []}, where="old.json")
    with pytest.raises(UsageError, match="not a result"):
        compare([row(0.5)], {"schema": "rlctl.train/1"}, where="old.json")


def test_wrong_bits_and_slowness_fail(capfd: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(["gloo"], equal_tensors(GIB, 4))
    limit = limit_of([sample(0.1)], GIB)
    with pytest.raises(CheckError, match=r"wrong bits: gloo \(full\): 2"):
        check(BenchResult(options, limit, [row(0.5, wrong=2)]), None, [])
    with pytest.raises(CheckError, match=r"0.3 of the memory copy: gloo \(full\) 0.200"):
        check(BenchResult(options, limit, [row(0.5)]), 0.3, [])
    with pytest.raises(CheckError, match="the old result"):
        check(BenchResult(options, limit, [row(0.5)]), 0.9, [Comparison("gloo", "full", 64, 4.0, 2.0, 0.5)])
    with pytest.raises(RlctlError, match=r"gloo \(delta\): lost"):
        check(BenchResult(options, limit, [row(0.5)], [Failed("gloo", "delta", "lost")]), None, [])
    for reason, remedy in (("Read-only file system", "file.folder"), ("No space left on device", "--shm-size")):
        with pytest.raises(RlctlError) as caught:
            check(BenchResult(options, limit, [row(0.5)], [Failed("file", "full", reason)]), None, [])
        assert remedy in str(caught.value)
    check(BenchResult(options, limit, [row(0.5)]), 0.19, [])


def test_a_prediction(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--simulate", "--profile", "64xH100-separate", "--model"]
    assert run("sync-bench", [*arguments, "kimi-k2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["simulation"]
    assert found["prediction"] is True
    assert not found["fits"]  # a quarter of two terabytes
    # Every replica gets the model, spread evenly over 32 cards of 50 GB/s.
    slices = found["predicted"]["slices"]
    assert slices["moved"] == pytest.approx(8 * found["weights"], rel=0.01)
    assert slices["seconds"] == pytest.approx(8 * found["weights"] / 32 / 50e9, rel=0.05)
    # vLLM's ranks load whole tensors: each replica has one worker, which gets all of them over its card.
    whole = found["predicted"]["whole"]
    assert found["delivery"] == "whole"
    assert whole["moved"] == 8 * found["weights"]
    assert whole["seconds"] == pytest.approx(found["weights"] / 50e9, rel=0.05)
    assert found["one_sender_s"] == pytest.approx(found["weights"] / 50e9, rel=0.02)
    assert {f["model"] for f in found["public"]} == {"kimi-k2"}
    assert run("sync-bench", [*arguments, "qwen3-8b"]) == 0
    assert "PREDICTION" in capfd.readouterr().out
    assert run("sync-bench", [*arguments, "qwen3-8b", "--rollouts", "2", "--csv"]) == 2
    assert "--simulate does not go with --rollouts, --csv" in capfd.readouterr().err
    for wrong in (["--simulate"], ["--profile", "64xH100-separate"],
                  ["--simulate", "--model", "kimi-k2", "--profile", "8xH100-colocate"]):  # fmt: skip
        assert run("sync-bench", wrong) == 2


def test_a_picture(tmp_path: Path) -> None:
    save_sync_plot(tmp_path / "speeds.png", [("gloo full", 1.5), ("gloo raw", 2.0)], 7.0, title="weight sync")
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["speeds.png"]


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


def test_a_backend_that_breaks_at_once_is_told() -> None:
    options = BenchOptions(["ipc"], equal_tensors(1 << 20, 3))
    result = run_bench(options, [[Squad("ipc", 1 << 20, way="by road")]])
    assert result.rows == []
    assert "by road" in result.failed[0].error
    assert result.limit.gib_per_s > 0


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    """Full and delta each write into a folder of their own in it."""
    options = BenchOptions(
        ["file"], equal_tensors(1 << 20, 3), iters=1, warmup=0, delta=True, change=0.02,
        extras={"file": {"folder": str(tmp_path), "keep": 1}},
    )  # fmt: skip
    result = run_bench(options, [squads(options)])
    assert [(row.variant, row.wrong) for row in result.rows] == [("full", 0), ("delta", 0)]
    assert result.rows[0].extra_bytes is not None
    assert result.rows[0].extra_bytes >= 1 << 20  # the version that is kept
    assert list(tmp_path.iterdir()) == []
