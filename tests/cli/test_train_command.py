"""``rlctl train`` up to the point where it trains: plans, configurations, scripts, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import main
from rlctl.config import list_profiles, to_json
from rlctl.ops.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep run folders out of the checkout."""
    monkeypatch.chdir(tmp_path)


def train(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["train", *words])
    out, err = capfd.readouterr()
    return code, out, err


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def test_profiles_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = train(capfd, "--list-profiles")
    assert (code, err) == (0, "")
    names = [info.name for info in list_profiles()]
    assert [line.split()[0] for line in out.splitlines()[1:]] == names
    code, out, _ = train(capfd, "--list-profiles", "--json")
    assert [entry["name"] for entry in document(out)["profiles"]] == names


def test_the_configuration_can_be_fed_back(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--profile", "16xH100-separate", "--show-config")
    code, shown, err = train(capfd, *words, "run.steps=7", "--seed", "3")
    assert (code, err) == (0, "")
    assert "steps: 7" in shown
    assert "argument run.steps=7" in shown
    file = tmp_path / "shown.yaml"
    file.write_text(shown)
    _, before, _ = train(capfd, *words, "run.steps=7", "--seed", "3", "--json")
    code, after, _ = train(capfd, "--config", str(file), "--show-config", "--json")
    assert code == 0
    assert document(after)["config"] == document(before)["config"]
    assert document(after)["config"]["run"] | {"steps": 7, "seed": 3} == document(after)["config"]["run"]


def test_a_dry_run_prints_layout_batches_and_checks(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = train(capfd, "--profile", "8xH100-colocate", "--dry-run")
    assert (code, err) == (0, "")
    assert len([line for line in out.splitlines() if "  trainer  " in line]) == 8
    for text in ("train batch", "weight sync by naive", "devices_suffice", "needs 1 node of 8 x NVIDIA H100"):
        assert text in out
    code, out, _ = train(capfd, "--profile", "8xH100-colocate", "--dry-run", "--json")
    assert code == 0
    assert document(out)["valid"] is True


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["algorithm.advantage=gae"], "algorithm.critic.model", "algorithm.critic.model=actor"),
        (
            ["algorithm.rollout_correction.rollout_is=token", "rollout.temperature=0"],
            "rollout.temperature",
            "set it above 0",
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token_k9"],
            "algorithm.rollout_correction.rollout_rs",
            "known: token_k1",
        ),
        (["algorithm.preset=grdo"], "algorithm.preset", "known: dr_grpo"),
    ],
)
def test_mistakes_in_the_algorithm_are_refused_before_anything_runs(words, key, fix, capfd, tmp_path) -> None:
    for more in ((), ("--dry-run",)):
        code, _, err = train(capfd, *words, *more)
        assert code == 2
        assert key in err
        assert fix in err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_the_algorithm_amounts_to(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("algorithm.rollout_correction.preset=bypass_pg_geo_rs_seq_tis", "algorithm.kl.place=reward")
    code, out, _ = train(capfd, "--dry-run", "--json", *words)
    assert code == 0
    found = document(out)["algorithm"]
    assert found["loss"] == "reinforce, token-mean"
    assert found["rollout correction"] == "sequence weights <= 2, rejection by seq_mean_k1; in the loss (bypass)"
    assert found["KL"] == "k3 in the reward, weight 0.001, to the first model"
    code, out, _ = train(capfd, "--dry-run", *words)
    assert "sequence weights <= 2" in out


def test_a_dry_run_with_violations_shows_all_and_exits_2(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--dry-run", "trainer.mini_batch_prompts=7", "placement.trainer_ranks=3", "--json")
    code, out, err = train(capfd, *words)
    assert code == 2
    violated = [check for check in document(out)["checks"] if check["status"] == "violated"]
    assert len(violated) >= 2
    assert f"{len(violated)} faults" in err
    assert all(check["message"] in err for check in violated)


def test_absent_hardware_exits_3_with_both_ways_on(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = train(capfd, "--profile", "8xH100-colocate", "--json")
    assert code == 3
    assert document(out)["error"]["message"].startswith("profile 8xH100-colocate needs 1 node of 8 x NVIDIA H100")
    assert "--dry-run" in err
    assert "--profile cpu-quickstart" in err
    assert list(tmp_path.iterdir()) == []


def test_the_batch_script_repeats_what_was_asked(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "16xH100-separate", "--print-sbatch", "--steps", "3", "task.name=my file.jsonl")
    code, out, err = train(capfd, *words)
    assert (code, err) == (0, "")
    assert "rlctl train --profile 16xH100-separate --steps 3 'task.name=my file.jsonl' --resume auto" in out
    code, in_document, _ = train(capfd, *words, "--json")
    assert code == 0
    assert document(in_document)["script"] == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--show-config"], "--show-config and --dry-run exclude each other"),
        (["--resume", "auto", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["run.stps=3", "foo=1"], "configuration: 2 faults"),
        (["--profile", "cpu-quickstrat"], "unknown profile 'cpu-quickstrat'; did you mean 'cpu-quickstart'?"),
        (["--steps", "many"], "invalid value for '--steps'"),
        (["--resume", "nowhere"], "--resume: nowhere is not a folder"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
    ],
)
def test_wrong_use_exits_2(capfd: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = train(capfd, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def save_run(folder: Path, *overrides: str, profile: str = "cpu-quickstart") -> Path:
    folder.mkdir()
    saved = to_json(resolve(profile, env={}, overrides=overrides).resolved)
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


def test_a_resumed_run_keeps_what_it_was_saved_with(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", "run.steps=7", "trainer.prompts_per_step=8")
    code, out, _ = train(capfd, "--resume", str(run), "--show-config", "--json", "run.seed=5")
    assert code == 0
    shown = document(out)
    assert shown["profile"] == "cpu-quickstart"
    assert shown["config"]["run"]["steps"] == 7
    assert shown["config"]["trainer"]["prompts_per_step"] == 8
    assert shown["config"]["run"]["seed"] == 5
    assert shown["origins"]["run.steps"] == f"{run}/config.json"


def test_a_resumed_run_refuses_another_profile(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    code, _, err = train(capfd, "--resume", str(run), "--profile", "cpu-separate", "--dry-run")
    assert code == 2
    assert err.startswith("error: --profile: the run began with cpu-quickstart, not with cpu-separate")
    code, _, _ = train(capfd, "--resume", str(run), "--profile", "cpu-quickstart", "--dry-run")
    assert code == 0


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from rlctl.cli import main; code = main(['train', '--dry-run', '--profile', '64xH100-separate']);"
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm', 'rich', 'matplotlib') if m in sys.modules]);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_dry_run_says_what_it_will_take(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "8xH100-colocate", "--dry-run", "--json")
    code, out, _ = train(capfd, *words)
    found = document(out)["forecast"]
    assert (code, found["memory"]["fits"], found["not_predicted"]) == (0, True, None)
    # Each of 8 replicas wants the whole model, 16.4 GB in bfloat16, and holds an eighth of it.
    assert found["sync"]["bytes"] == pytest.approx(8 * 8190735360 * 2 * 7 / 8, rel=0.01)
    assert found["sync"]["predicted_s"] == pytest.approx(found["sync"]["bytes"] / 8 / 450e9, rel=0.2)


def test_a_dry_run_of_what_does_not_fit_exits_4(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--profile", "8xH100-colocate", "--dry-run", "model.gradient_checkpointing=false")
    code, out, err = train(capfd, *words)
    assert code == 4
    assert "forward backward (shared): does not fit" in out
    assert "try model.gradient_checkpointing=true" in err
