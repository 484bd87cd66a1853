"""The replay command on small recorded runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import main
from tests.ops.replay.recorded import new_run, train
from tests.ops.replay.told import write_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_run(tmp_path_factory.mktemp("runs") / "recorded")


def documents(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["replay", *words, "--json"]) == code, capfd.readouterr().err
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    return document


def test_the_list_names_records_and_checkpoints(recorded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = documents([str(recorded), "--list"], capfd)
    assert document["schema"] == "rlctl.replay/1"
    kept = {step["step"]: step["kept"] for step in document["steps"]}
    assert list(kept) == [0, 1, 2, 3]
    assert kept[2] == ["events", "record", "checkpoint"]
    assert document["bytes"]["records"] > 0
    assert main(["replay", str(recorded), "--list"]) == 0
    out = capfd.readouterr().out
    assert "events record checkpoint" in out


def test_samples_show_their_texts_and_gaps(recorded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (step,) = documents([str(recorded), "--show", "--step", "2", "--samples", "99"], capfd)["steps"]
    assert step["source"] == "record"
    assert len(step["samples"]) == step["samples_in_all"] == 16
    for sample in step["samples"]:
        assert len(sample["response_ids"]) == len(sample["gaps"]) == len(sample["staleness"])
        assert sum(piece["tokens"] for piece in sample["pieces"]) == len(sample["response_ids"])
        assert all(abs(gap) < 1e-4 for gap in sample["gaps"])
        assert "".join(sample["tokens_text"]) == sample["response"]
        assert sample["prompt"]
    assert step["staleness_tokens"] == {"0": sum(len(sample["response_ids"]) for sample in step["samples"])}
    assert main(["replay", str(recorded), "--show", "--step", "2"]) == 0
    out = capfd.readouterr().out
    assert step["samples"][0]["prompt"] in out
    assert "8 of 16 responses" in out


def test_a_damaged_record_is_told_and_its_events_are_shown(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    file = run / "records" / "step_00000002" / "batch.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (step,) = documents([str(run), "--show", "--step", "2"], capfd)["steps"]
    assert step["source"] == "events"
    assert "batch.safetensors" in step["fault"]
    assert step["samples"][0]["prompt"] is None


def test_equal_runs_are_equal_and_a_resumed_copy_names_key_and_step(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    document = documents([str(recorded), "--diff", str(copy)], capfd)
    assert document["equal"]
    assert document["compared"][-1] == "records of 3"
    shutil.rmtree(copy / "ckpt" / "step_3")
    train(copy, "--resume", str(copy), "trainer.optimizer.lr=1e-5")
    document = documents([str(recorded), "--diff", str(copy)], capfd, code=4)
    assert [d["key"] for d in document["config"]] == ["trainer.optimizer.lr"]
    assert document["resumed_at"]["other"] == [2]
    assert document["last_equal_step"] == 2
    assert (document["first_difference"]["step"], document["first_difference"]["stage"]) == (3, "update_actor")
    assert main(["replay", str(recorded), "--diff", str(copy)]) == 4
    out, err = capfd.readouterr()
    assert "part after step 2, in step 3" in out
    assert "trainer.optimizer.lr" in err


def test_exports_hold_every_response(recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("all.jsonl", "all.parquet"):
        assert documents([str(recorded), "--export", str(tmp_path / name)], capfd)["responses"] == 48
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "all.parquet").to_pylist() == lines
    for line in lines:
        assert len(line["response_ids"]) == len(line["logprobs"]) == len(line["versions"]) > 0
        assert [s["end"] for s in line["segments"]][-1] == len(line["response_ids"])
    assert len({line["id"] for line in lines}) == 48
    assert main(["replay", str(recorded), "--export", str(tmp_path / "all.csv")]) == 2


def test_pruning_leaves_what_the_window_needs(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    would = documents([str(run), "--prune", "--keep", "1", "--dry-run"], capfd)["removed"]
    assert would["records"] == [1, 2]
    assert sorted(p.name for p in (run / "records").glob("step_*"))[0] == "step_00000001"
    assert documents([str(run), "--prune", "--keep", "1"], capfd)["removed"] == would
    assert [p.name for p in (run / "records").glob("step_*")] == ["step_00000003"]
    assert documents([str(run), "--show", "--step", "3"], capfd)["steps"][0]["source"] == "record"
    assert documents([str(run), "--prune", "--keep", "1"], capfd)["removed"]["nbytes"] == 0


def test_every_level_of_every_step_is_exact(recorded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = documents([str(recorded), "--level", "all"], capfd)["results"]
    assert [(r["step"], r["level"], r["status"]) for r in results] == [
        (step, level, "exact") for step in (1, 2, 3) for level in ("R0", "R1", "R2", "R3", "R4")
    ]
    assert all(r["first_difference"] is None for r in results)
    assert main(["replay", str(recorded), "--level", "r0", "--level", "R4", "--step", "2:"]) == 0
    assert "2 to 3  exact  exact" in capfd.readouterr().out


def test_what_if_tells_both_figures_and_changes_nothing(recorded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    document = documents([str(recorded), "--step", "2", "--what-if", "trainer.optimizer.lr=1e-3"], capfd)
    (result,) = document["results"]
    assert (result["step"], result["status"]) == (2, "differs")
    assert result["metrics"]["lr"] == 1e-3
    assert len(result["params_digest"]) == 64
    assert before == {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    assert main(["replay", str(recorded), "--step", "2", "--what-if", "rollout.temperature=2"]) == 2


def test_what_was_changed_is_named_with_exit_4(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    gone = next(i for i, line in enumerate(lines) if '"kind":"selected","step":2' in line)
    (run / "events.jsonl").write_text("".join(lines[:gone] + lines[gone + 1 :]))
    document = documents([str(run), "--level", "R0", "--level", "R4"], capfd, code=4)
    differing = [r for r in document["results"] if r["status"] == "differs"]
    assert {r["level"] for r in differing} == {"R0", "R4"}
    assert document["faults"]
    assert main(["replay", str(run), "--level", "R4"]) == 4
    assert f"event {gone}" in capfd.readouterr().err


def test_a_run_with_events_alone_says_what_it_lacks(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    shutil.rmtree(run / "records")
    results = documents([str(run)], capfd)["results"]
    assert {r["status"] for r in results if r["level"] == "R4"} == {"exact"}
    assert {(r["status"], r["reason"]) for r in results if r["level"] == "R2"} == {
        ("unavailable", "no record of the step is kept; run.record=batches keeps one of each in its window")
    }
    assert main(["replay", str(run), "--level", "R1"]) == 3
    assert main(["replay", str(run), "--level", "R4", "--step", "7"]) == 2


def test_actions_that_do_not_go_together_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run"))
    for words in (["--list", "--show"], ["--keep", "3"], ["--level", "R9"], ["--show", "--step", "9"], ["--step", "x"]):
        assert main(["replay", run, *words]) == 2, words
        assert capfd.readouterr().err.startswith("error:")


@pytest.mark.parametrize(
    "words",
    [
        ["--diff", "RUN", "--step", "1"],
        ["--prune", "--anomalies"],
        ["--list", "--samples", "3"],
        ["--step", "1", "--what-if", "trainer.optimizer.lr"],
        ["--step", "1", "--what-if", "run.threads=100000"],
        ["--step", "1", "--what-if", "trainer.optimzer.lr=1"],
    ],
    ids=" ".join,
)
def test_what_would_be_passed_over_is_refused(
    words: list[str], recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(recorded) if word == "RUN" else word for word in words]
    assert documents([str(recorded), *words], capfd, code=2)["schema"] == "rlctl.error/1"
    (step,) = documents([str(recorded), "--list", "--step", "2"], capfd)["steps"]
    assert step["step"] == 2
