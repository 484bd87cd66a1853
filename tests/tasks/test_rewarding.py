"""Rewards by a user's function: in a child process, within a deadline each, failures told and contained."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.tasks import rewarding
from rlctl.tasks.base import Sample, Task, TaskOptions
from rlctl.tasks.cycle import CycleTask
from rlctl.tasks.registry import load_task
from rlctl.tasks.rewarding import RewardScorer

REWARDS = """
import math, os, signal, sys, time
import neighbour
print("imported", os.getpid(), flush=True)
calls = 0

def reward(prompt, response, answer):
    global calls
    calls += 1
    print("stdout of a reward")
    sys.stderr.write("stderr of a reward\\n")
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        time.sleep(100)
    if response == "raise":
        raise KeyError("oh no")
    if response == "paint":
        raise ValueError("a\\x1b[31mb\\rc\\n  d" + "e" * 1000)
    if response == "exit":
        sys.exit(7)
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "calls":
        return calls
    if response == "pid":
        return {"reward": 0.5, "pid": os.getpid()}
    if response == "metrics":
        return {"reward": 0.25, "length": 3, "fine": True}
    if response == "echo":
        return {"reward": 1, "prompt": len(prompt), "answer": len(answer)}
    return {
        "nan": math.nan, "inf": -math.inf, "none": None, "text": "1.0", "true": True, "list": [1.0], "huge": 10**400,
        "no reward": {"length": 1.0}, "metric text": {"reward": 1.0, "why": "x"}, "one": 1, "complex": 1j,
    }[response]

def wrong_arity(prompt):
    return 1.0

not_a_function = 3
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "prompt", "answer": "answer!"}) + "\n")
    return load_task(str(tmp_path / "d.jsonl"), verifier=f"{tmp_path / 'rewards.py'}:reward", held_out=0.0)


@pytest.fixture
def scorer(task: Task, tmp_path: Path) -> Iterator[RewardScorer]:
    with RewardScorer(task, 0.5, tmp_path / "log") as running:
        yield running


def sample(index: int) -> Sample:
    return Sample(index, "prompt", "answer!")


def batch(*responses: str) -> list[tuple[Sample, str]]:
    return [(sample(10 + i), response) for i, response in enumerate(responses)]


def test_failures_are_told_by_sample_and_the_others_still_score(scorer: RewardScorer) -> None:
    begin = time.monotonic()
    scores = scorer.score(batch("one", "hang", "one", "raise", "crash", "exit", "nan", "sleep", "true"))
    assert time.monotonic() - begin < 30
    assert [s.index for s in scores] == list(range(10, 19))
    assert [s.reward for s in scores] == [1, 0, 1, 0, 0, 0, 0, 0, 1]
    assert [s.failed for s in scores] == [
        None, "timeout", None, "raised: KeyError: 'oh no'", "died: SIGSEGV", "died: exit code 7", "not a number: nan",
        "timeout", None,
    ]  # fmt: skip


def test_what_is_no_finite_number_counts_as_failed(scorer: RewardScorer) -> None:
    shown = {
        "nan": "nan", "inf": "-inf", "none": "None", "text": "'1.0'", "list": "[1.0]", "huge": "1000", "complex": "1j",
        "no reward": "a mapping without 'reward'", "metric text": "'x'",
    }  # fmt: skip
    for response, score in zip(shown, scorer.score(batch(*shown)), strict=True):
        assert score.reward == 0.0
        assert score.failed is not None
        assert score.failed.startswith(f"not a number: {shown[response]}")
        assert len(score.failed) < 250


def test_what_a_function_says_is_told_in_one_plain_line(scorer: RewardScorer) -> None:
    (score,) = scorer.score(batch("paint"))
    assert score.failed is not None
    assert score.failed.startswith("raised: ValueError: a [31mb c deee") and score.failed.isprintable()
    assert len(score.failed) < 250


def test_a_mapping_gives_metrics_and_the_function_gets_prompt_and_answer(scorer: RewardScorer) -> None:
    first, second = scorer.score(batch("metrics", "echo"))
    assert (first.reward, first.metrics) == (0.25, {"length": 3.0, "fine": 1.0})
    assert second.metrics == {"prompt": 6.0, "answer": 7.0}


def test_the_function_lives_on_between_calls_until_one_is_late(scorer: RewardScorer) -> None:
    first, second, late, fresh = scorer.score(batch("calls", "calls", "sleep", "calls"))
    assert (first.reward, second.reward, late.failed, fresh.reward) == (1, 2, "timeout", 1)


def test_the_child_is_the_only_one_that_imports_and_its_output_stays_out_of_ours(
    scorer: RewardScorer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (score,) = scorer.score(batch("pid"))
    assert score.metrics["pid"] != os.getpid()
    assert "neighbour" not in sys.modules
    assert "rewards" not in sys.modules
    scorer.close()
    log = (tmp_path / "log").read_text()
    assert f"imported {score.metrics['pid']:.0f}" in log
    assert "stdout of a reward" in log
    assert "stderr of a reward" in log
    assert capfd.readouterr() == ("", "")


def test_a_function_that_never_answers_ends_the_run_with_one_clear_error(
    scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewarding, "HOPELESS", 2)
    with pytest.raises(RlctlError, match=r"the first 2 rewards all took longer than 0\.5 s") as caught:
        scorer.score(batch(*["sleep"] * 8))
    assert caught.value.fix is not None


def test_after_a_first_answer_any_number_may_be_late(scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewarding, "HOPELESS", 1)
    scores = scorer.score(batch("one", "sleep", "sleep", "one"))
    assert [s.failed for s in scores] == [None, "timeout", "timeout", None]


def test_a_catastrophic_regular_expression_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "p", "answer": "^(a+)+$"}) + "\n")
    task = load_task(str(path), verifier="regex", held_out=0.0)
    with RewardScorer(task, 0.5) as scorer:
        scores = scorer.score([(task.sample(0), text) for text in ("aaa", "a" * 40 + "b", "b")])
    assert [(s.reward, s.failed) for s in scores] == [(1.0, None), (0.0, "timeout"), (0.0, None)]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ("nothing", r"cannot be loaded: \S+rewards\.py has no function 'nothing'$"),
        ("not_a_function", "has no function"),
        ("wrong_arity", "cannot be called with .prompt, response, answer."),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_the_start(task: Task, function: str, match: str) -> None:
    assert task.verifier is not None
    task.verifier = f"{task.verifier.rpartition(':')[0]}:{function}"
    with pytest.raises(UsageError, match=match):
        RewardScorer(task, 1.0)


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def reward(", "SyntaxError"),
        ("raise SystemExit(5)", "exit code 5"),
    ],
)
def test_files_that_cannot_be_imported_are_refused_at_the_start(task: Task, code: str, match: str) -> None:
    assert task.verifier is not None
    Path(task.verifier.rpartition(":")[0]).write_text(code)
    with pytest.raises(UsageError, match=match):
        RewardScorer(task, 1.0)


def test_a_module_is_found_where_the_command_was_started(task: Task, tmp_path: Path) -> None:
    code = (
        "from rlctl.tasks.registry import load_task\nfrom rlctl.tasks.rewarding import RewardScorer\n"
        "task = load_task('d.jsonl', verifier='rewards:reward', held_out=0.0)\n"
        "with RewardScorer(task, 5.0) as scorer:\n    print(scorer.score([(task.sample(0), 'one')])[0].reward)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_a_task_of_ours_is_scored_in_this_process_with_its_metrics() -> None:
    with RewardScorer(CycleTask.create("cycle", TaskOptions()), 1.0) as scorer:
        scores = scorer.score([(Sample(3, "6-1-9e", "5"), text) for text in ("5", "<think>", "4")])
    assert [(s.index, s.reward, s.metrics["think"]) for s in scores] == [(3, 1, 0), (3, 0, 1), (3, 0, 0)]


class BrokenTask(CycleTask):
    def score(self, sample: Sample, response_text: str) -> float:
        raise RuntimeError("broken")


def test_a_plugin_task_that_raises_is_contained_too() -> None:
    with RewardScorer(BrokenTask(), 1.0) as scorer:
        (score,) = scorer.score([(sample(1), "5")])
    assert score.failed == "raised: RuntimeError: broken"
