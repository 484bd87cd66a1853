"""A run that is killed and resumed ends with the parameters of a run that was left alone. Real processes, SIGKILL."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlctl.cli import main
from tests.model.tiny_reward import save_reward_model
from tests.warm_starts import start_module

STEPS = 24
ARGUMENTS = [
    f"run.steps={STEPS}", "run.threads=1", "run.checkpoint_every=2", "run.validate_prompts=0",
    "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=2", "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=24", "trainer.optimizer.lr=1e-3",
]  # fmt: skip


def start(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    return start_module(
        "rlctl",
        ["train", "--json", "--run-dir", str(run_dir), *ARGUMENTS, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )


def finish(process: subprocess.Popen[bytes]) -> dict:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()[-2000:]
    return json.loads(out)


def steps_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at(process: subprocess.Popen[bytes], run_dir: Path, step: int, delay: float) -> None:
    """Send SIGKILL ``delay`` seconds after the run has done ``step`` steps."""
    deadline = time.monotonic() + 150
    while steps_done(run_dir) < step and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def run_with_kills(run_dir: Path, kills: int, rng: random.Random, *more: str) -> dict:
    points = sorted(rng.sample(range(1, STEPS - 1), kills))
    for step in points:
        kill_at(start(run_dir, "--resume", "auto", *more), run_dir, step, rng.uniform(0, 0.08))
    return finish(start(run_dir, "--resume", "auto", *more))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> dict:
    return finish(start(tmp_path_factory.mktemp("untouched") / "run"))


def check(result: dict, untouched: dict, run_dir: Path) -> None:
    assert result["params_digest"] == untouched["params_digest"]
    assert result["steps"] == STEPS
    assert result["reward"] == untouched["reward"]
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert not [p.name for p in run_dir.rglob("*.tmp")]


@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_left_alone(tmp_path, untouched):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    result = run_with_kills(tmp_path / "run", 2, random.Random(seed))
    check(result, untouched, tmp_path / "run")


@pytest.mark.timeout(600)
def test_a_run_of_an_adapter_that_is_killed_and_resumed_too(tmp_path, capfd):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    run, lora = tmp_path / "run", "model.lora.rank=8"
    killed = start(run, lora, "model.lora.sync=adapter")
    kill_at(killed, run, rng.randrange(3, 7), rng.uniform(0, 0.08))
    assert killed.returncode == -signal.SIGKILL
    alone = ["--run-dir", str(tmp_path / "alone"), *ARGUMENTS[1:], lora]
    results = []
    for words in (["--resume", str(run)], alone):
        capfd.readouterr()
        assert main(["train", "--json", *words, "run.steps=9"]) == 0
        results.append(json.loads(capfd.readouterr().out))
    resumed, left_alone = results  # sent adapters alone, and merged weights
    for key in ("params_digest", "steps", "reward"):
        assert resumed[key] == left_alone[key]


MIXTURE = "task.mixture=[{name: cycle, weight: 3}, {name: two_turn, weight: 1}]"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", ["task.name=two_turn", MIXTURE])
def test_a_killed_conversation_and_a_killed_mixture_go_on(tmp_path, words):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    alone = finish(start(tmp_path / "alone", words))
    result = run_with_kills(tmp_path / "run", 4, random.Random(seed), words)
    print("digest", alone["params_digest"])
    check(result, alone, tmp_path / "run")
    assert result["tasks"] == alone["tasks"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills(tmp_path, untouched):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    result = run_with_kills(tmp_path / "run", 10, random.Random(seed))
    check(result, untouched, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, 2], ids=["shared", "pool"])
def test_killed_and_resumed_with_a_reward_model(tmp_path, devices):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    pool = [f"cluster.devices_per_node={devices}", f"placement.reward_devices={devices - 1}"]
    more = [f"reward_model.path={save_reward_model(tmp_path / 'rm')}", "reward_model.normalize=batch", *pool]
    untouched = finish(start(tmp_path / "untouched", *more))
    check(run_with_kills(tmp_path / "run", 2, random.Random(seed), *more), untouched, tmp_path / "run")


def test_a_signal_saves_a_checkpoint_and_asks_for_a_requeue(tmp_path, untouched):
    process = start(tmp_path / "run")
    deadline = time.monotonic() + 150
    while steps_done(tmp_path / "run") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 75, err.decode()
    assert b"--resume auto" in err
    assert json.loads(out)["exit_code"] == 75
    again = finish(start(tmp_path / "run", "--resume", "auto"))
    check(again, untouched, tmp_path / "run")
    # A finished run that is asked for again is done at once, with the same answer.
    at_once = finish(start(tmp_path / "run", "--resume", "auto"))
    assert {k: v for k, v in at_once.items() if k != "time"} == {k: v for k, v in again.items() if k != "time"}


@pytest.mark.new_interpreters
def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start(tmp_path / "run")
    deadline = time.monotonic() + 150
    while steps_done(tmp_path / "run") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130
    assert json.loads(out)["exit_code"] == 130
    assert f"rlctl train --resume {tmp_path / 'run'}".encode() in err
    assert b"Traceback" not in err
