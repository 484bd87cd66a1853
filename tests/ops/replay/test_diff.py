"""Where two runs part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlctl.experience.events import Event, RunStarted, StepEnded
from rlctl.ops.replay.diff import compare_runs, stage_of
from rlctl.ops.replay.history import read_history
from rlctl.ops.replay.parting import STAGES
from tests.ops.replay.told import step_events, write_config, write_events, write_run


def test_equal_runs_are_equal_whatever_their_pace(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    other = shutil.copytree(one, tmp_path / "other")
    text = (other / "events.jsonl").read_text()
    (other / "events.jsonl").write_text(text.replace('"seconds":0.5', '"seconds":0.75').replace('"time":1', '"time":3'))
    found = compare_runs(read_history(one), read_history(other))
    assert found.equal
    assert found.equal_steps == [1, 2, 3, 4]


def test_a_copy_resumed_under_another_rate_names_the_key_and_the_step(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", steps=12)
    other = shutil.copytree(one, tmp_path / "other")
    write_config(other, "trainer.optimizer.lr=1e-5")
    seq = next(e.seq for e in read_history(one).events if isinstance(e, StepEnded) and e.step == 10)
    told: list[Event] = [RunStarted(mode="sync", seed=0, from_step=10, from_seq=seq)]
    write_events(other, [*told, *step_events(11, lr=1e-5), *step_events(12, lr=1e-5, reward=0.0)], 1, 9000.0)
    found = compare_runs(read_history(one), read_history(other))
    assert [(d.key, d.this, d.other) for d in found.config] == [("trainer.optimizer.lr", 5e-5, 1e-5)]
    assert found.resumed == {"this": [], "other": [10]}
    assert found.equal_steps[-1] == 10
    assert found.parting is not None
    assert (found.parting.step, found.parting.stage, found.parting.tensor) == (11, "update_actor", "lr")
    assert found.parting.max_abs == pytest.approx(4e-5)
    assert not found.equal


@pytest.mark.parametrize(
    ("change", "stage", "tensor"),
    [
        ({"reward": 0.25}, "reward", "reward"),
        ({"loss": 0.25}, "update_actor", "loss"),
        ({"tokens": 6}, "generate", "tokens"),
        ({"tokens": 6, "loss": 0.1}, "generate", "tokens"),
    ],
)
def test_the_first_stage_that_differs_is_named(
    tmp_path: Path, change: dict[str, float], stage: str, tensor: str
) -> None:
    one, other = write_run(tmp_path / "one"), tmp_path / "other"
    write_config(other)
    told: list[Event] = [RunStarted(mode="sync", seed=0)]
    for step in range(1, 5):
        told += step_events(step, **(change if step == 3 else {}))  # type: ignore[arg-type]
    write_events(other, told)
    parting = compare_runs(read_history(one), read_history(other)).parting
    assert parting is not None
    assert (parting.step, parting.stage, parting.tensor) == (3, stage, tensor)


def test_steps_that_one_run_alone_has_are_a_difference(tmp_path: Path) -> None:
    found = compare_runs(
        read_history(write_run(tmp_path / "one")), read_history(write_run(tmp_path / "other", steps=6))
    )
    assert found.parting is None
    assert found.only == {"this": [], "other": [5, 6]}
    assert not found.equal


def test_every_metric_has_a_stage() -> None:
    for name in ("reward", "loss", "grad_norm", "generated_tokens", "value_loss", "rollout_corr/kl", "tasks/a/reward"):
        assert stage_of(name) in STAGES
