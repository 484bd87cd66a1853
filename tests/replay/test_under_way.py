"""A run that is being written is replayed as far as it is there, and what is let go meanwhile is no difference."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import main
from rlctl.errors import EXIT_REQUEUE
from rlctl.experience.records.reading import read_run
from rlctl.replay.findings import Finding, Steps
from rlctl.replay.whole import replay_run
from rlctl.runtime.run_directory import RunDirectory
from tests.trainers.recorded import record
from tests.warm_starts import start_module

pytestmark = pytest.mark.timeout(120)

SMALL = ("trainer.prompts_per_step=2", "trainer.mini_batch_prompts=1", "rollout.max_new_tokens=8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "recorded"
    record(run, *SMALL, "run.keep_checkpoints=8", "run.checkpoint_every=1", steps=4)
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "run")


@pytest.fixture
def held(run: Path) -> Iterator[Path]:
    """A run in whose folder a process is at work."""
    directory = RunDirectory.open(run, resume=True)
    yield run
    directory.close()


def statuses(findings: Iterator[Finding]) -> dict[str, str]:
    return {f"{f.step} {f.level}": f"{f.status} {f.reason}".strip() for f in findings}


@pytest.mark.parametrize("level", ["R0", "R1", "R2", "R3"])
def test_a_record_that_is_let_go_meanwhile_is_unavailable(level: str, run: Path) -> None:
    findings = replay_run(run, steps=Steps(), levels=[level])
    found = statuses(islice(findings, 1))
    shutil.rmtree(run / "records" / "step_00000003")
    found |= statuses(findings)
    assert found[f"1 {level}"] == found[f"2 {level}"] == "exact"
    assert found[f"4 {level}"] == "exact"
    assert found[f"3 {level}"].startswith("unavailable step 3 has no record") or level == "R3"  # it was read before


@pytest.mark.parametrize("level", ["R0", "R2"])
def test_so_is_what_needs_a_checkpoint_that_is(level: str, run: Path) -> None:
    findings = replay_run(run, steps=Steps(first=2), levels=[level])
    found = statuses(islice(findings, 1))
    shutil.rmtree(run / "ckpt" / "step_3")
    found |= statuses(findings)
    assert not [name for name, status in found.items() if status.startswith("differs")]
    assert found[f"3 {level}"] == "exact"


def test_a_what_if_goes_on_with_the_other_steps(run: Path) -> None:
    findings = replay_run(run, steps=Steps(), levels=[], what_if=["trainer.optimizer.lr=1e-3"])
    found = list(islice(findings, 1))
    shutil.rmtree(run / "records" / "step_00000002")
    found += findings
    assert [finding.status for finding in found] == ["differs", "unavailable", "differs", "differs"]
    assert found[1].reason == "step 2 has no record: it was let go while the replay ran"


def test_a_line_that_is_not_whole_yet_is_no_fault_of_a_run_under_way(
    held: Path, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dead = shutil.copytree(recorded, tmp_path / "dead")
    for folder in (held, dead):
        for name in ("result.json", "records/end.json", "records/SHA256SUMS"):
            (folder / name).unlink()
        log = folder / "events.jsonl"
        log.write_bytes(log.read_bytes()[:-20])
    assert read_run(held).faults == []
    assert {f.status for f in replay_run(held, steps=Steps(), levels=["R0", "R4"])} == {"exact"}
    assert [f.step for f in replay_run(dead, steps=Steps(), levels=["R0"]) if f.status == "differs"] == [0]
    for words in (["--list"], ["--show"], ["--level", "R0"]):
        assert main(["replay", str(held), *words]) == 0
        assert "a process is at work in the run's folder" in capfd.readouterr().err
    assert main(["replay", str(held), "--list", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["under_way"], document["faults"]) == (True, [])
    assert main(["replay", str(held), "--step", "9", "--show"]) == 2
    assert "steps 1 to 4 are there so far" in capfd.readouterr().err
    assert main(["replay", str(held), "--prune"]) == 2
    assert "in use by another process" in capfd.readouterr().err


def test_replays_beside_a_run_find_nothing_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, page, lines = tmp_path / "run", str(tmp_path / "page.html"), str(tmp_path / "all.jsonl")
    words = [
        "train", "-q", "--run-dir", str(run), *SMALL, "run.steps=100000", "run.record=batches", "run.record_window=2",
        "run.checkpoint_every=1", "run.validate_prompts=0", "run.threads=1", "rollout.samples_per_prompt=2",
    ]  # fmt: skip
    asked = (["--list"], ["--show"], ["--level", "R0"], ["--level", "all"], ["--html", page], ["--export", lines])
    with start_module("rlctl", words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trains:
        try:
            while trains.poll() is None and not ((run / "config.json").exists() and read_run(run).steps):
                time.sleep(0.05)
            for choice in asked:
                code = main(["replay", str(run), *choice, "--json"])
                out, err = capfd.readouterr()
                document: dict[str, Any] = json.loads(out)
                assert code in ((0, 3) if choice[0] == "--export" else (0,)), (choice, err)
                assert document.get("faults", []) == [], choice
                assert [r for r in document.get("results", []) if r["status"] == "differs"] == []
                assert trains.poll() is None, trains.communicate()[1]
        finally:
            trains.send_signal(signal.SIGTERM)
            told = trains.communicate(timeout=60)[1]
    assert trains.returncode == EXIT_REQUEUE, told
    assert main(["replay", str(run), "--level", "all", "-q"]) == 0, capfd.readouterr().err
