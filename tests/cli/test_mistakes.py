"""Mistakes on purpose, through the command line: each is refused before the first step, with what is wrong, where, and
what to do, and by the dry run too. Nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.cli import main
from rlctl.rollout.base import RolloutEngine
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.rollout.traits import EngineTraits
from tests.model.tiny_reward import actor_tokenizer, save_reward_model

SMALL = [
    "run.threads=1", "run.steps=1", "run.validate_prompts=0", "rollout.max_new_tokens=8", "trainer.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
]  # fmt: skip
GAE = "algorithm.advantage=gae"
CORRECTION = "algorithm.rollout_correction.rollout_is=token"
REWARD_MODEL = "reward_model.path"
EXACT = "task.verifier=exact"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the mistakes need: models, adapters, data."""
    folder = tmp_path_factory.mktemp("made")
    save_reward_model(folder / "rm")
    save_reward_model(folder / "several", outputs=3)
    foreign = actor_tokenizer()
    foreign.add_tokens(["<other>"])
    save_reward_model(folder / "foreign", tokenizer=foreign)
    (folder / "rm-without-weights").mkdir()
    (folder / "rm-without-weights" / "config.json").write_text((folder / "rm" / "config.json").read_text())
    save_adapter(folder / "wide", width=256)
    save_adapter(folder / "rank-4", width=128)
    for name, answers in {"all": ["", " ", ""], "some": ["1", "", "3", "  "], "good": ["1", "2", "3"]}.items():
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": answer}) for n, answer in enumerate(answers)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def save_adapter(folder: Path, *, width: int) -> None:
    """Write an adapter of rank 4 for a model whose two layers are ``width`` wide."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": torch.zeros(4, width), f"{name}.lora_B.weight": torch.zeros(width, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class WithoutLogProbs(EmbeddedEngine):
    """Another package's engine, which says of itself that it returns no log-probs."""

    traits = EngineTraits(("cpu",), tensor_parallel=False, logprobs=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engines: dict[str, type[RolloutEngine]] = {"silent": WithoutLogProbs}
    monkeypatch.setattr(ROLLOUT_ENGINES, "_registered", engines)


# Words, with {made} for the folder -> where it is wrong, what is wrong, what to do.
MISTAKES: dict[str, tuple[list[str], str, str, str]] = {
    "alpha 0": (["model.lora.rank=4", "model.lora.alpha=0"], "model.lora.alpha", "above 0", ""),
    "no adapter there": (
        ["model.lora.rank=4", "model.lora.adapter={made}/gone"], "model.lora.adapter", "does not exist",
        "give the folder of an adapter",
    ),
    "adapter for another model": (
        ["model.lora.rank=4", "model.lora.target_modules=[q_proj]", "model.lora.adapter={made}/wide"],
        "model.lora.adapter", "256", "adapter",
    ),
    "adapter of another rank": (
        ["model.lora.rank=8", "model.lora.target_modules=[q_proj]", "model.lora.adapter={made}/rank-4"],
        "model.lora.", "rank", "set model.lora.rank=4",
    ),
    "gae without a critic": (
        [GAE], "algorithm.critic.model", "needs the values of a critic", "algorithm.critic.model=actor"
    ),
    "no critic there": (
        [GAE, "algorithm.critic.model={made}/gone"], "algorithm.critic.model", "does not exist", "give a folder"
    ),
    "correction without log-probs": (
        [CORRECTION, "rollout.engine=silent"], "rollout.engine", "engine silent returns none", "take another engine"
    ),
    "bypass without log-probs": (
        ["trainer.old_log_probs=rollout", "rollout.engine=silent"], "rollout.engine", "engine silent returns none",
        "trainer.old_log_probs=recompute",
    ),
    "no device for the reward model": (
        [f"{REWARD_MODEL}={{made}}/rm", "placement.reward_devices=1"], "placement.reward_devices",
        "has no device left", "set it to 0",
    ),
    "no pool for the reward model": (
        ["--profile", "cpu-separate", "--mode", "separate_async", f"{REWARD_MODEL}={{made}}/rm"],
        "placement.reward_devices", "needs devices of its own", "set it to 1 or more",
    ),
    "no pool of that name": (["placement.reward_pool=gpu"], "placement.reward_pool", "unknown", "placement"),
    "nothing that rewards": (
        ["--task", "{made}/all.jsonl", "task.verifier=none"], REWARD_MODEL, "gives no reward", "set it to the model's"
    ),
    "no reward model there": ([f"{REWARD_MODEL}={{made}}/gone"], REWARD_MODEL, "does not exist", "give a folder"),
    "a reward model without weights": (
        [f"{REWARD_MODEL}={{made}}/rm-without-weights"], REWARD_MODEL, "holds no *.safetensors", "save_pretrained"
    ),
    "a reward model without a head": (
        [f"{REWARD_MODEL}=cycle-tiny"], REWARD_MODEL, "scores would be random", "ForSequenceClassification"
    ),
    "a reward model of several outputs": (
        [f"{REWARD_MODEL}={{made}}/several"], "reward_model.output", "3 outputs", "set it to one of 0 .. 2"
    ),
    "settings without a reward model": (
        ["reward_model.weight=2"], REWARD_MODEL, "there is no reward model", "set it to the model's folder"
    ),
    "a classifier as the model": (
        ["--model", "{made}/rm"], "model.path", "no head that predicts tokens", "reward_model.path"
    ),
    "no model there": (["--model", "{made}/gone"], "model.path", "does not exist", "give a folder"),
    "no reference there": (
        ["algorithm.kl.place=loss", "algorithm.kl.reference={made}/gone"], "algorithm.kl.reference",
        "does not exist", "give a folder",
    ),
    "all answers empty": (["--task", "{made}/all.jsonl", EXACT], "all.jsonl:1", "is empty", ""),
    "some answers empty": (["--task", "{made}/some.jsonl", EXACT], "some.jsonl:4", "is empty", ""),
    "all answers empty, for a function": (
        ["--task", "{made}/all.jsonl", "task.verifier=json:dumps"], "all.jsonl:1", "all 3 answers", "task.answer_field"
    ),
}  # fmt: skip
ONLY_WITH_TORCH = {
    "a reward model with another vocabulary": (
        [f"{REWARD_MODEL}={{made}}/foreign", "reward_model.input=tokens"], "reward_model.input",
        "vocabulary is not the policy's", "chat or text",
    ),
}  # fmt: skip


def refused(
    capfd: pytest.CaptureFixture[str], made: Path, mistake: tuple[list[str], str, str, str], *more: str
) -> None:
    words, where, what, fix = mistake
    code = main(["train", *SMALL, *(word.format(made=made) for word in words), *more])
    err = capfd.readouterr().err
    assert code == 2, err
    for part in (where, what, fix):
        assert part in err, err
    assert "Traceback" not in err
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_dry_run_finds_it(name: str, made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused(capfd, made, MISTAKES[name], "--dry-run")


@pytest.mark.parametrize("name", [*MISTAKES, *ONLY_WITH_TORCH])
def test_a_run_does_not_begin(name: str, made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused(capfd, made, (MISTAKES | ONLY_WITH_TORCH)[name], "--run-dir", "run")


def test_a_dry_run_looks_at_models_adapters_and_data_without_torch(made: Path) -> None:
    words = [
        f"reward_model.path={made}/rm", "algorithm.kl.place=loss", "algorithm.kl.reference=cycle-tiny", f"{GAE}",
        "algorithm.critic.model=cycle-tiny", "model.lora.rank=4", "model.lora.target_modules=[q_proj]",
        f"model.lora.adapter={made}/rank-4", f"task.name={made}/good.jsonl", EXACT,
    ]  # fmt: skip
    code = (
        "import sys; from rlctl.cli import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'peft', 'vllm') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--dry-run", *words],
        capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "1 x the task's + 1 x the score of" in done.stdout


def test_a_hub_name_is_no_fault_of_a_plan(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = main(["train", "--dry-run", "--json", "--model", "nobody/no-such-model"])
    (found,) = [c for c in json.loads(capfd.readouterr().out)["checks"] if c["rule"] == "model_is_there"]
    assert (code, found["status"]) == (0, "note")
    assert "not in the local cache" in found["message"]


REWARDS = "import sys, time\n{before}\ndef reward(prompt, response, answer):\n    return {value}\n"


def verifier(before: str = "", value: str = "1.0") -> None:
    Path("odd.py").write_text(REWARDS.format(before=before, value=value))


@pytest.mark.parametrize("value", ["1e300", "-1e300", "float('nan')", "float('inf')", "{'reward': 1e300}"])
def test_a_reward_that_cannot_be_trained_on_is_refused_with_its_prompt(
    value: str, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verifier(value=value)
    code = main(["train", *SMALL, "--task", f"{made}/good.jsonl", "task.verifier=odd.py:reward", "--run-dir", "run"])
    err = capfd.readouterr().err
    assert code == 1
    name = {"1": "out of range: 1e+300", "-": "out of range: -1e+300", "{": "out of range: 1e+300"}
    assert name.get(value[0], f"not a number: {value[7:10]}") in err
    assert "of prompt 0, " in err or "of prompt 1, " in err
    assert "good.jsonl:" in err
    assert "task.verifier: none of the 4 rewards of the step can be used" in err
    assert not Path("run", "final").exists()


def test_one_such_reward_among_others_counts_as_0_and_is_told(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verifier(value="1e300 if prompt.startswith('1') else 1.0")
    words = ["--task", f"{made}/good.jsonl", "task.verifier=odd.py:reward", "task.held_out=0"]
    small = [word for word in SMALL if "prompts_per_step" not in word]
    assert main(["train", *small, *words, "trainer.prompts_per_step=3", "--run-dir", "run"]) == 0
    err = capfd.readouterr().err
    assert "2 of 6 rewards failed (out of range: 1e+300, beyond +-1e+15; first: prompt" in err
    assert "good.jsonl:2) and count as 0" in err


def test_a_verifier_that_hangs_on_import_is_waited_for_aloud(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.tasks.rewarding.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr("rlctl.tasks.rewarding.IMPORT_SECONDS", 20.0)
    verifier(before="import os\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.05)")
    heard: list[str] = []
    warn: Callable[..., None] = heard.append

    def hear(self: object, text: str) -> None:
        warn(text)
        Path("go").touch()

    monkeypatch.setattr("rlctl.report.output.Report.warn", hear)
    words = ["--task", f"{made}/good.jsonl", "task.verifier=odd.py:reward", "--run-dir", "run"]
    assert main(["train", *SMALL, *words]) == 0, capfd.readouterr().err
    assert "odd.py to be imported, for" in heard[0] and "s more at most" in heard[0]
