"""A checkpoint is evaluated as the run that made it was, and not a byte of the run changes."""

import hashlib
import json
from pathlib import Path

import pytest

from rlctl.cli import main
from rlctl.config import to_json
from rlctl.experience.event_log import read_events
from rlctl.experience.events import Validated
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training

SHORT = [
    "run.steps=3", "run.threads=1", "run.validate_prompts=6", "run.validate_every=1", "run.checkpoint_every=1",
    "trainer.prompts_per_step=2", "trainer.optimizer.lr=3e-3", "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=12", "run.keep_checkpoints=3",
]  # fmt: skip
HEAD = ["train", "--json", "run.validate_only=true"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    path = RunPath(folder, resume=False)
    resolution = resolve_run(path, overrides=SHORT)
    run_training(resolution.config, path, document=to_json(resolution.resolved))
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "")
        for p in sorted([folder, *folder.rglob("*")])
    }


def evaluate(capfd: pytest.CaptureFixture[str], *words: str) -> dict:
    code = main([*HEAD, *words])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("words", [[], ["auto"], ["ckpt/step_2"], ["ckpt/step_3"]])
def test_a_checkpoint_gives_what_its_run_measured(
    capfd: pytest.CaptureFixture[str], run: Path, words: list[str]
) -> None:
    before = snapshot(run)
    if words == ["auto"]:
        document, step = evaluate(capfd, "--run-dir", str(run), "--resume", "auto"), 3
    else:
        document = evaluate(capfd, "--resume", str(run.joinpath(*words)))
        step = int(words[0][-1]) if words else 3
    assert snapshot(run) == before
    assert document["step"] == step
    assert document["checkpoint"] == str(run / "ckpt" / f"step_{step}")
    (measured,) = {
        json.dumps([e.accuracy, e.by_label, e.prompts], sort_keys=True)
        for e in read_events(run / "events.jsonl").events
        if isinstance(e, Validated) and e.step == step
    }
    found = document["eval"]
    assert json.dumps([found["accuracy"], found["by_label"], found["prompts"]], sort_keys=True) == measured
    result = json.loads((run / "result.json").read_text())
    assert (document["params_digest"] == result["params_digest"]) == (step == 3)


def test_the_final_folder_gives_what_the_last_checkpoint_does(
    capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = evaluate(capfd, "--model", str(run / "final"), *SHORT)
    assert document["checkpoint"] is None
    assert document["eval"] == evaluate(capfd, "--resume", str(run))["eval"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resume", "auto"], "there is no checkpoint to go on from"),
        (["--resume", "auto", "--run-dir", "new"], "there is no checkpoint under new"),
        (["run.validate_prompts=0"], "no prompts to evaluate"),
    ],
)
def test_nothing_to_evaluate_is_a_usage_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*HEAD, *words]) == 2
    assert says in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_from_an_older_checkpoint_in_place_is_still_refused(
    capfd: pytest.CaptureFixture[str], run: Path
) -> None:
    before = snapshot(run)
    assert main(["train", "--resume", str(run / "ckpt" / "step_2")]) == 2
    assert "not the newest checkpoint of its run (step_3 is)" in capfd.readouterr().err
    assert snapshot(run) == before
