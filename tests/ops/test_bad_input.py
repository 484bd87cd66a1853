"""What a user gets wrong ends in one clear message, the right exit code, and nothing half-written."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from rlctl.cli import main
from rlctl.ops.run_path import choose_run_path
from rlctl.runtime.run_directory import RunDirectory
from rlctl.tasks.builtin_models import builtin_model_path
from tests.warm_starts import run_module

SMALL = ["run.threads=1", "run.validate_prompts=0", "rollout.max_new_tokens=8", "run.checkpoint_every=1"]
QUICK = [*SMALL, "trainer.prompts_per_step=2", "rollout.samples_per_prompt=2"]


def train(capfd, *words: str) -> tuple[int, str]:
    code = main(["train", *QUICK, *words])
    return code, capfd.readouterr().err


@pytest.fixture
def data(tmp_path):
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "x"}\n{oops\n')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run.stpes=3"], 2, 'did you mean "run.steps"'),
        (["run.steps=three"], 2, "expected int"),
        (["--model", "/no/such/folder"], 2, "/no/such/folder does not exist"),
        (["--task", "empty.jsonl", "task.verifier=exact"], 2, "no prompts"),
        (["--task", "gone.jsonl"], 2, "cannot read gone.jsonl"),
        (["--task", "bad.jsonl", "task.verifier=exact"], 2, "bad.jsonl:3"),
        (["--task", "missing.jsonl", "task.verifier=exact"], 2, "missing.jsonl"),
        (["--task", "good.jsonl", "task.verifier=exakt"], 2, "exact"),
        (["trainer.prompts_per_step=16", "trainer.mini_batch_prompts=5"], 2, "does not divide"),
        (["--mode", "sycn"], 2, "did you mean 'sync'"),
        (["--resume", "nowhere"], 2, "nowhere is not a folder"),
        (["--profile", "8xH100-colocate"], 3, "--dry-run"),
        (["--profile", "8xH100-colocat"], 2, "8xH100-colocate"),
    ],
)
def test_one_message_one_code_and_nothing_written(capfd, monkeypatch, data, words, code, says):
    monkeypatch.chdir(data)
    before = sorted(p.name for p in data.iterdir())
    begin = time.monotonic()
    where = [] if "--resume" in words else ["--run-dir", "run"]
    result = main(["train", *words, *where]), capfd.readouterr().err
    assert result[0] == code, result[1]
    assert says in result[1]
    assert "Traceback" not in result[1]
    assert time.monotonic() - begin < 20
    assert sorted(p.name for p in data.iterdir()) == before


def test_a_run_folder_in_use_or_unwritable(capfd, tmp_path):
    holder = RunDirectory.open(tmp_path / "run", resume=False)
    code, err = train(capfd, "--run-dir", str(tmp_path / "run"), "--resume", "auto")
    assert code == 2 and "in use" in err
    holder.close()
    code, err = train(capfd, "--run-dir", "/proc/no-run-here")
    assert code == 1 and "cannot be written" in err and "Traceback" not in err


def test_rewards_that_hang_raise_or_are_no_number_count_as_failed_and_are_told(capfd, monkeypatch, data):
    monkeypatch.chdir(data)
    (data / "odd.py").write_text(
        "import time\n"
        "def reward(prompt, response, answer):\n"
        "    number = int(answer)\n"
        "    print('noise')\n"
        "    if number % 4 == 0: time.sleep(60)\n"
        "    if number % 4 == 1: raise ValueError('boom')\n"
        "    if number % 4 == 2: return float('nan')\n"
        "    return 1.0\n"
    )
    code = main(
        ["train", *SMALL, "--task", "good.jsonl", "task.verifier=odd.py:reward", "task.reward_timeout=0.2",
         "trainer.prompts_per_step=8", "rollout.samples_per_prompt=1", "run.steps=1", "--run-dir", "run", "--json"]
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert code == 0, err
    assert json.loads(out)["steps"] == 1
    for reason in ("timeout", "ValueError: boom", "nan"):
        assert reason in err
    assert "noise" not in out + err
    assert "noise" in (data / "run" / "logs" / "reward.log").read_text()


def test_rewards_that_fail_for_a_reason_each_are_told_in_few_lines(capfd, monkeypatch, data):
    monkeypatch.chdir(data)
    (data / "odd.py").write_text(
        "count = 0\ndef reward(prompt, response, answer):\n"
        "    global count\n    count += 1\n    raise ValueError(f'reason {count}')\n"
    )
    words = ["--task", "good.jsonl", "task.verifier=odd.py:reward", "run.steps=1", "--run-dir", "run"]
    code, err = train(capfd, *words)
    assert code == 0, err
    assert err.count("warning:") == 4 and "1 more rewards failed for other reasons" in err


def test_a_full_disk_is_one_message_and_the_run_goes_on_later(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

    words = [sys.executable, "-m", "rlctl", "train", *QUICK, "run.steps=2", "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    full = subprocess.run(words, check=False, preexec_fn=limit, env=env, capture_output=True, text=True, timeout=200)
    assert full.returncode == 1, full.stderr
    assert "File too large" in full.stderr and "--resume" in full.stderr and "Traceback" not in full.stderr
    assert not list((tmp_path / "run" / "ckpt").iterdir())
    assert not (tmp_path / "run" / "result.json").exists()
    again = run_module("rlctl", [*words[3:], "--resume", "auto"], env=env, timeout=200)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_prompt_that_is_too_long_is_told_before_anything_starts(capfd, data):
    line = json.dumps({"prompt": "x" * 5000, "answer": "1"})
    (data / "long.jsonl").write_text((data / "good.jsonl").read_text() + line + "\n")
    code, err = train(capfd, "--task", str(data / "long.jsonl"), "task.verifier=exact", "--run-dir", str(data / "run"))
    assert code == 2
    assert "long.jsonl:13" in err and "task.max_prompt_tokens" in err
    assert not (data / "run").exists()


def test_a_tokenizer_larger_than_the_model_is_told(capfd, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(builtin_model_path("cycle-tiny")).save_pretrained(tmp_path / "model")
    code, err = train(capfd, "--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run"))
    assert code == 2
    assert "model.path" in err and "the model embeds 50" in err


def test_a_run_that_diverged_ends_and_one_cannot_go_back(capfd, tmp_path):
    folder = str(tmp_path / "run")
    code, err = train(capfd, "--run-dir", folder, "trainer.optimizer.lr=1e4", "run.steps=40")
    assert code == 1 and "diverged" in err, err
    code, err = train(capfd, "--run-dir", str(tmp_path / "short"), "run.steps=3")
    assert code == 0, err
    code, err = train(capfd, "--resume", str(tmp_path / "short"), "run.steps=2")
    assert code == 2 and "3 steps already" in err


def test_which_folder_a_run_goes_on_in(tmp_path):
    def run(name: str, *, done: bool) -> None:
        (tmp_path / name / "ckpt" / "step_2").mkdir(parents=True)
        (tmp_path / name / "ckpt" / "step_4").mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        if done:
            (tmp_path / name / "result.json").write_text("{}")

    run("a", done=False)
    run("b", done=True)
    chosen = choose_run_path(None, "auto", name="n", root=tmp_path)
    assert chosen.path == tmp_path / "a" and chosen.resume
    assert not choose_run_path(None, None, name="n", root=tmp_path).resume
    newest = choose_run_path(None, str(tmp_path / "a" / "ckpt" / "step_4"), name="n")
    assert newest.path == tmp_path / "a" and newest.resume
    with pytest.raises(Exception, match="not the newest"):
        choose_run_path(None, str(tmp_path / "a" / "ckpt" / "step_2"), name="n").require_trainable()
    fork = choose_run_path(tmp_path / "c", str(tmp_path / "a" / "ckpt" / "step_2"), name="n")
    assert fork.path == tmp_path / "c" and fork.fork_from is not None and not fork.resume
    with pytest.raises(Exception, match="name two runs"):
        choose_run_path(tmp_path / "c", str(tmp_path / "a"), name="n")
