"""Reading a configuration: precedence, origins, types, and every fault at once with its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config import Layer, load_config
from rlctl.config.keytable import get_value
from tests.config.loading import faults, load


def test_precedence_and_origin_of_every_source(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "# mine\nrun:\n  steps: 2\n  seed: 2\n  threads: 2\n  keep_checkpoints: 2\n  validate_every: 2\n"
    )
    later = tmp_path / "later.yaml"
    later.write_text("run: {threads: 5}\n")
    first = tmp_path / "first.yaml"
    first.write_text("run:\n  threads: 4\n  keep_checkpoints: 4\n  steps: 4\n  seed: 4\n")
    resolved = load_config(
        str(profile),
        layers=[Layer("runs/a/config.json", {"run": {"validate_every": 3}, "run.seed": 3})],
        files=[str(first), str(later)],
        env={"RLCTL_RUN__SEED": "6", "RLCTL_RUN__KEEP_CHECKPOINTS": "6"},
        overrides=["run.keep_checkpoints=7"],
        flags={"--steps": 8, "--mode": None},
    )
    run = resolved.config.run
    assert (run.validate_every, run.threads, run.seed, run.keep_checkpoints, run.steps) == (3, 5, 6, 7, 8)
    assert resolved.origin("run.validate_every") == "runs/a/config.json"
    assert resolved.origin("run.threads") == f"{later}:1"
    assert resolved.origin("run.seed") == "RLCTL_RUN__SEED"
    assert resolved.origin("run.keep_checkpoints") == "argument run.keep_checkpoints=7"
    assert resolved.origin("run.steps") == "--steps"
    assert resolved.origin("run.record") == "default"


def test_origin_of_a_shipped_profile_names_file_and_line() -> None:
    assert (
        load_config("cpu-quickstart", env={})
        .origin("trainer.mode")
        .startswith("profile cpu-quickstart (cpu-quickstart.yaml:")
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("trainer.optimizer.lr", "1e-5", 1e-5),
        ("trainer.optimizer.lr", "1E-5", 1e-5),
        ("trainer.optimizer.lr", "+.5", 0.5),
        ("trainer.optimizer.lr", '"1e-5"', 1e-5),
        ("run.steps", "010", 10),
        ("run.steps", "1e3", 1000),
        ("sync.bucket_size", "512MiB", 512 << 20),
        ("sync.bucket_size", "2GB", 2 * 10**9),
        ("sync.bucket_size", "4096", 4096),
        ("sync.timeout", "30s", 30.0),
        ("sync.timeout", "1h30m", 5400.0),
        ("sync.timeout", "2.5", 2.5),
        ("run.deterministic", "on", True),
        ("run.deterministic", "No", False),
        ("run.deterministic", "1", True),
        ("task.name", "no", "no"),
        ("task.name", "1e-5", "1e-5"),
        ("cluster.device_name", '""', ""),
        ("task.verifier", "null", None),
        ("task.verifier", '"null"', "null"),
        ("trainer.mini_batch_prompts", "~", None),
        ("model.lora.target_modules", "[q_proj, 'v_proj']", ["q_proj", "v_proj"]),
        ("model.lora.target_modules", "[]", []),
        ("sync.commit", "staged", "staged"),
    ],
)
def test_a_value_means_the_same_in_file_environment_and_argument(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    section, *middle, leaf = key.split(".")
    nested = f"{section}: {{" + "".join(f"{m}: {{" for m in middle) + f"{leaf}: {text}" + "}" * (len(middle) + 1)
    for resolved in (
        load(tmp_path, nested),
        load(tmp_path, env={"RLCTL_" + key.upper().replace(".", "__"): text}),
        load(tmp_path, overrides=[f"{key}={text}"]),
    ):
        found = get_value(resolved.config, key)
        assert found == value
        assert type(found) is type(value)


def test_foreign_names_get_the_right_key_and_every_fault_is_listed(tmp_path: Path) -> None:
    text = 'learning_rate: 1e-5\ntraining: {num-epochs: 3}\nlora: {r: "eight"}\nmodel: {lora: {rank: "eight"}}\n'
    assert faults(tmp_path, text) == [
        'config.yaml:1: learning_rate: unknown key; did you mean "trainer.optimizer.lr" (number)?',
        'config.yaml:2: training.num-epochs: unknown key; did you mean "task.epochs" (int)?',
        'config.yaml:3: lora.r: unknown key; did you mean "model.lora.rank" (int)?',
        "config.yaml:4: model.lora.rank: expected int, got str 'eight'",
    ]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("run: {setps: 3}", "run.steps"),
        ("runn: {steps: 3}", "run.steps"),
        ("run: {validate-every: 3}", "run.validate_every"),
        ("run: {validateEvery: 3}", "run.validate_every"),
        ("trainer: {lr: 3}", "trainer.optimizer.lr"),
        ("max_steps: 3", "run.steps"),
        ("data: {train_batch_size: 3}", "trainer.prompts_per_step"),
        ("rollout: {tensor_model_parallel_size: 2}", "placement.replica_tp"),
        ("rollout: {n_samples: 2}", None),
        ("bucket_size: 3", "sync.bucket_size"),
    ],
)
def test_suggestions(tmp_path: Path, text: str, nearest: str | None) -> None:
    (fault,) = faults(tmp_path, text)
    assert "unknown key" in fault
    assert (f'did you mean "{nearest}"' in fault) if nearest else ("has: engine, samples_per_prompt" in fault)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run:\n  steps: eight", ["config.yaml:2: run.steps", "expected int", "got str 'eight'"]),
        ("run:\n  steps: true", ["expected int", "got bool 'true'"]),
        ("run:\n  steps: 1.5", ["expected int", "got float '1.5'"]),
        ("run:\n  steps: -1", ["-1 is too small; the least is 0"]),
        ("run:\n  steps: 99999999999999999999", ["is too large"]),
        ("run:\n  steps: [1]", ["expected int", "a list of 1"]),
        ("run:\n  steps:", ["expected int, got nothing"]),
        ("run: 3", ["config.yaml:1: run: expected a section of keys, got int '3'"]),
        ("rollout: {top_p: 1.5}", ["1.5 is too large; the most is 1"]),
        ("rollout: {top_p: 0}", ["0.0 is too small; it must be above 0"]),
        ("rollout: {temperature: .nan}", ["expected number", "'.nan'"]),
        ("rollout: {temperature: 1e999}", ["too large for a number"]),
        ("sync: {commit: stagd}", ["unknown value 'stagd'; did you mean 'staged'?"]),
        ("sync: {bucket_size: 3 parsec}", ["expected size, got str '3 parsec'", "write 512MiB"]),
        ("sync: {timeout: soon}", ["expected duration, got str 'soon'", "write 30s"]),
        ("run: {deterministic: maybe}", ["expected bool, got str 'maybe'"]),
        ("task: {name: null}", ["expected str, got nothing"]),
        ("model: {lora: {target_modules: q_proj}}", ["expected list of str", "write it as [a, b]"]),
        ("model: {lora: {target_modules: [[a]]}}", ["expected list of str, got a list of 1 in the list"]),
        ("run.steps: 3", ["keys are nested in a file, not dotted", "nest it: run: steps"]),
    ],
)
def test_wrong_values_name_the_key_both_types_and_the_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (fault,) = faults(tmp_path, text)
    assert fault.startswith("config.yaml:")
    for part in parts:
        assert part in fault


def test_environment_names(tmp_path: Path) -> None:
    env = {
        "RLCTL_RUN__STEP": "3",
        "RLCTL_RUN_STEPS": "3",
        "RLCTL_MODEL__TRUST_REMOTE_CODE": "maybe",
        "RLCTL_X__Y": "1",
        "RLCTL_DEBUG": "1",
        "RLCTL_LOG": "debug",
        "_RLCTL_COMPLETE": "source_bash",
        "RLCTL_RUN_TOKEN": "t",
        "PATH": "/bin",
    }
    assert sorted(faults(tmp_path, env=env)) == [
        "RLCTL_MODEL__TRUST_REMOTE_CODE: model.trust_remote_code: expected bool, got str 'maybe'; "
        "write true or false (also 1/0, yes/no, on/off)",
        "RLCTL_RUN_STEPS: sections and keys are joined by two underscores; did you mean RLCTL_RUN__STEPS?",
        "RLCTL_RUN__STEP: no such key; did you mean RLCTL_RUN__STEPS?",
        "RLCTL_X__Y: no such key",
    ]
    assert load(tmp_path, env={"RLCTL_MODEL__LORA__RANK": "4"}).config.model.lora.rank == 4


def test_arguments_repeated_empty_or_malformed(tmp_path: Path) -> None:
    assert load(tmp_path, overrides=["run.steps=3", "run.steps=3"], flags={"--steps": 3}).config.run.steps == 3
    assert load(tmp_path, overrides=["run.steps=${run.seed}"] * 2, flags={"--seed": 4}).config.run.steps == 4
    assert load(tmp_path, overrides=["run.steps=1e1", "run.steps=10"]).config.run.steps == 10
    assert load(tmp_path, "task: {epochs: 3}", overrides=["task.epochs="]).config.task.epochs is None
    assert load(tmp_path, overrides=["cluster.device_name=''"]).config.cluster.device_name == ""
    for overrides, flags, part in [
        (["run.steps=3", "run.steps=4"], {}, "set twice, differently: argument run.steps=3 and argument run.steps=4"),
        (["run.steps=3"], {"--steps": 4}, "set twice, differently: argument run.steps=3 and --steps"),
        (["run.steps=${run.seed}", "run.steps=3"], {}, "set twice, differently"),
        (["run.steps="], {}, "expected int, got nothing"),
        (["cluster.device_name="], {}, "write '' for the empty text"),
        (["run.steps"], {}, "argument run.steps: expected key=value; write run.steps=VALUE"),
        (["=3"], {}, "expected key=value"),
        (["+run.steps=3"], {}, "write run.steps=3"),
        (["run=3"], {}, "run: a section, not a key; set one of its keys: run.steps"),
        (["run.setps=3"], {}, 'did you mean "run.steps" (int)?'),
        (["model.lora.target_modules=[a"], {}, "write it as [a, b]"),
        (["task.name=\udcff"], {}, "holds bytes that are no text"),
    ]:
        (fault,) = faults(tmp_path, overrides=overrides, flags=flags)
        assert part in fault


def test_mode_defaults_fill_what_nobody_set_or_set_to_null(tmp_path: Path) -> None:
    def defaults(mode: str, config: object) -> dict[str, object]:
        return {"trainer.warmup_batches": 4, "trainer.max_staleness": 3, "trainer.partial_rollout": True}

    resolved = load(tmp_path, "trainer: {warmup_batches: null, max_staleness: 1}", mode_defaults=defaults)
    assert resolved.config.trainer.warmup_batches == 4.0
    assert resolved.config.trainer.max_staleness == 1
    assert resolved.config.trainer.partial_rollout is True
    assert resolved.origin("trainer.warmup_batches") == "mode sync"
    assert resolved.origin("trainer.max_staleness").endswith("config.yaml:1")


def test_open_names_are_checked_with_the_rest(tmp_path: Path) -> None:
    names = {"rollout.engine": lambda: ["transformers", "vllm", "recorded"]}
    assert load(tmp_path, "rollout: {engine: 'recorded:runs/a'}", open_choices=names).config.rollout.engine
    found = faults(tmp_path, "rollout:\n  engine: vlm\nrun: {steps: x}", open_choices=names)
    assert len(found) == 2
    assert "config.yaml:2: rollout.engine: unknown name 'vlm'; did you mean 'vllm'?" in found[1]


def test_interpolation(tmp_path: Path) -> None:
    text = (
        "run: {steps: 40, validate_every: '${run.steps}'}\n"
        "trainer: {optimizer: {warmup_steps: '${run.steps}', lr: '1e-${run.seed}'}}\n"
        "task: {name: '\\${keep}'}\nmodel: {lora: {target_modules: ['${rollout.engine}', b]}}\n"
    )
    config = load(tmp_path, text, overrides=["run.seed=3"]).config
    assert (config.run.validate_every, config.trainer.optimizer.warmup_steps) == (40, 40)
    assert config.trainer.optimizer.lr == 1e-3
    assert config.task.name == "${keep}"
    assert config.model.lora.target_modules == ["transformers", "b"]
    for value, part in [
        ("${run.nope}", "not found"),
        ("${", "cannot be resolved"),
        ("${task.name}", "cannot be resolved"),
        ("${model.path}", "itself an interpolation"),
        ("${oc.select:model.path,x}", "itself an interpolation"),
        ("${oc.env:RLCTL_NO_SUCH}", "cannot be resolved"),
        ("${run}", "expected str"),
        ("${nope:1}", "cannot be resolved"),
    ]:
        (fault,) = faults(tmp_path, f"task:\n  name: '{value}'\nmodel: {{path: '${{rollout.engine}}'}}")
        assert "config.yaml:2: task.name" in fault
        assert part in fault


def test_reading_a_profile_loads_nothing_heavy() -> None:
    code = (
        "import time, sys; from rlctl.config import load_config; t = time.process_time();"
        "load_config('8xH100-colocate', env={}); spent = time.process_time() - t;"
        "assert not {'torch', 'omegaconf', 'pydantic', 'numpy', 'rich'} & set(sys.modules); print(spent)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 0.05
