"""A step that failed is listed and shown as what it is: where it failed, what it said, and what there is of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import main
from rlctl.errors import RlctlError
from tests.trainers.recorded import record

SMALL = ("trainer.prompts_per_step=2", "trainer.mini_batch_prompts=1", "rollout.max_new_tokens=8")
FAILURE = {"stage": "update_actor", "round": 0, "message": "the loss of step 4 is nan"}
SAID = "failed in stage update_actor: the loss of step 4 is nan"


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "failed"
    record(run, *SMALL, steps=3)
    with pytest.raises(RlctlError, match="the loss of step 4 is nan"):
        record(run, "trainer.optimizer.lr=1e20", steps=6, resume=True)
    return run


def copied(run: Path, folder: Path, without: str) -> Path:
    """Copy a run but for one of its parts."""
    copy = shutil.copytree(run, folder / "run")
    gone = copy / without
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    return copy


def replay(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(["replay", *words]) == 0, capfd.readouterr().err
    return capfd.readouterr().out


def document(words: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(replay([*words, "--json"], capfd))
    return found


def test_show_has_its_samples_and_where_it_failed(failed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for chosen in ([], ["--step", "4"], ["--anomalies"]):
        (step,) = document([str(failed), "--show", *chosen], capfd)["steps"]
        assert (step["step"], step["version"], step["attempt"], step["source"]) == (4, None, 1, "record")
        assert step["failure"] == FAILURE
    assert len(step["samples"]) == step["samples_in_all"] == 8
    for sample in step["samples"]:
        assert sample["prompt"] and sample["response"] and sample["reward"] in (0.0, 1.0)
        assert [piece["version"] for piece in sample["pieces"]] == [3]
        assert len(sample["rollout_logprobs"]) == len(sample["response_ids"]) > 0
    out = replay([str(failed), "--show"], capfd)
    assert f"step 4 {SAID}\n8 responses, told by its record" in out
    assert step["samples"][0]["prompt"] in out
    (before,) = document([str(failed), "--show", "--step", "3"], capfd)["steps"]
    assert (before["version"], before["failure"]) == (3, None)


def test_the_page_has_it_too(failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    found = document([str(failed), "--html", str(page)], capfd)
    assert [step["failure"] for step in found["steps"]] == [None, None, None, FAILURE]
    assert any(mark["what"] == "step 4 failed: the loss of step 4 is nan" for mark in found["timeline"]["marks"])
    text = page.read_text()
    assert "3 trained and 1 failed" in text
    assert f"<b>step 4</b> <span class='bad'>{SAID}</span>: 8 responses" in text
    assert len(re.findall("<pre>", text[text.index("<b>step 4</b>") :])) == 16  # a prompt and a response each


def test_the_list_marks_it_without_a_pin_too(failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = document([str(failed), "--list"], capfd)["steps"]
    assert {step["step"]: (step["ended"], step["failure"]) for step in steps} == {
        **dict.fromkeys(range(4), (True, None)),
        4: (False, FAILURE),
    }
    assert steps[-1]["kept"] == ["events", "record"] and steps[-1]["samples"] == 8
    for part in ("records", "records/pinned.json"):
        copy = copied(failed, tmp_path / part, part)
        assert SAID in replay([str(copy), "--list"], capfd)


def test_events_alone_tell_it(failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (step,) = document([str(copied(failed, tmp_path, "records")), "--show"], capfd)["steps"]
    assert (step["step"], step["source"], step["failure"]) == (4, "events", FAILURE)
    assert [sample["reward"] is not None for sample in step["samples"]] == [True] * 8


def test_a_record_alone_tells_it(failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = copied(failed, tmp_path, "events.jsonl")
    (step,) = document([str(copy), "--show"], capfd)["steps"]
    assert (step["step"], step["attempt"], step["source"], step["failure"]) == (4, 1, "record", FAILURE)
    batch = copy / "records" / "step_00000004" / "batch.safetensors"
    batch.write_bytes(b"")
    (step,) = document([str(copy), "--show", "--step", "4"], capfd)["steps"]
    assert (step["source"], step["samples"], step["failure"]) == ("nothing", [], None)
    assert "batch.safetensors" in step["fault"]
    assert "step 4, 0 responses, told by nothing" in replay([str(copy), "--show", "--step", "4"], capfd)
