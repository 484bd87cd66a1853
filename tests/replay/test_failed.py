"""A step that fails stays recorded: it is an anomaly, and a replay shows where it fails."""

import hashlib

import msgspec
import pytest

from rlctl.errors import RlctlError
from rlctl.experience.records.manifest import BATCH, MANIFEST, SUMS, Failure
from rlctl.experience.records.reading import read_bundle, read_run
from rlctl.replay.findings import Steps
from rlctl.replay.whole import replay_run
from rlctl.trainers.base import Trainer
from rlctl.trainers.training import TrainingStages
from tests.trainers.recorded import record

pytestmark = pytest.mark.timeout(120)

SMALL = ("trainer.prompts_per_step=2", "trainer.mini_batch_prompts=1", "rollout.max_new_tokens=8")


def found(folder, *levels, **bounds):
    return {finding.level: finding for finding in replay_run(folder, steps=Steps(**bounds), levels=levels)}


def test_a_loss_that_is_not_finite_stays_recorded_and_fails_again(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RlctlError, match="the loss of step 1 is"):
        record(run, *SMALL, "trainer.optimizer.lr=1e38")
    kept = read_run(run)
    assert (kept.steps, kept.checkpoints, kept.faults) == ([1], [0], [])
    assert kept.pinned[1].checkpoint == 0
    assert kept.pinned[1].why[0].startswith("it failed in stage update_actor: the loss of step 1 is")
    bundle = read_bundle(run, 1)
    assert bundle.manifest.failure == Failure("update_actor", 0, "the loss of step 1 is nan")
    assert bundle.manifest.params_sha256 == "" and len(bundle.rounds[0].rows) == 8
    again = found(run, "R0", "R1", "R2", "R4", anomalies=True)
    assert [again[level].status for level in ("R0", "R1", "R2", "R4")] == ["exact"] * 3 + ["unavailable"]
    for level in ("R1", "R2"):
        assert again[level].reason == "the step failed in stage update_actor: the loss of step 1 is nan"
    place = bundle.folder
    manifest = msgspec.structs.replace(bundle.manifest, failure=Failure("update_actor", 0, "the loss of step 1 is inf"))
    (place / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    sums = [f"{hashlib.sha256((place / name).read_bytes()).hexdigest()}  {name}\n" for name in (BATCH, MANIFEST)]
    (place / SUMS).write_text("".join(sums))
    for level, other in found(run, "R1", "R2").items():
        assert (other.status, other.first_difference.stage) == ("differs", "update_actor"), level
        assert other.first_difference.tensor == "error: the loss of step 1 is nan"


@pytest.mark.parametrize("stage", ["balance", "advantages"])
def test_what_there_is_of_a_step_that_fails_before_its_update_is_kept(stage, tmp_path, monkeypatch):
    run, act = tmp_path / "run", getattr(TrainingStages, stage)

    def fails(self, step):
        if step.number == 2:
            raise ValueError("a fault that is put in")
        act(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStages, stage, fails)
        with pytest.raises(ValueError, match="put in"):
            record(run, *SMALL, "run.record_pins=0")
    assert read_run(run).steps == [1, 2] and read_run(run).pinned == {}
    assert read_bundle(run, 2).manifest.failure == Failure(stage, 0, "a fault that is put in")
    assert {level: one.status for level, one in found(run, "R0", "R1", "R2", last=1).items()} == dict.fromkeys(
        ("R0", "R1", "R2"), "exact"
    )
    again = found(run, "R0", "R1", "R2", first=2)
    assert again["R0"].status == "exact"
    for level in ("R1", "R2"):  # here nothing is put in
        assert (again[level].status, again[level].first_difference.tensor) == ("differs", "error: none")


def test_a_step_that_fails_behind_its_stages_is_kept_too(tmp_path, monkeypatch):
    run, act = tmp_path / "run", Trainer.update_weights

    def fails(self):
        if self.step_number == 2:
            raise ValueError("a fault that is put in")
        act(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update_weights", fails)
        with pytest.raises(ValueError, match="put in"):
            record(run, *SMALL)
    assert read_run(run).steps == [1, 2]
    assert read_run(run).pinned[2].why == ["it failed in stage on_step_end: a fault that is put in"]
    bundle = read_bundle(run, 2)
    assert bundle.manifest.failure == Failure("on_step_end", 0, "a fault that is put in")
    assert [len(one.rows) for one in bundle.rounds] == [8]
    again = found(run, "R0", "R1", "R2", first=2)
    assert {level: one.status for level, one in again.items()} == dict.fromkeys(("R0", "R1", "R2"), "exact")
    assert again["R2"].reason == "the step failed in stage on_step_end: a fault that is put in"


def test_a_step_without_responses_leaves_none(tmp_path, monkeypatch):
    from rlctl.rollout.rollouter import Rollouter

    def fails(self, *_, **__):
        raise ValueError("a fault that is put in")

    monkeypatch.setattr(Rollouter, "select", fails)
    with pytest.raises(ValueError, match="put in"):
        record(tmp_path / "run", *SMALL)
    assert read_run(tmp_path / "run").steps == [] and not list((tmp_path / "run" / "records").glob("step_*"))
