"""What a run records: every step, all that it stood on, and no more than the window."""

import hashlib

import pytest

from rlctl.experience.events import Checkpointed, Noted, RunEnded, StepEnded
from rlctl.experience.records.reading import lines_sha256, read_bundle, read_run
from rlctl.model.digest import tensors_digest
from rlctl.runtime.checkpoints import read_checkpoint

from .recorded import record

pytestmark = pytest.mark.timeout(240)


def test_every_step_of_a_run_is_recorded_with_all_it_stood_on(tmp_path):
    result = record(tmp_path / "run", "run.record=full", "algorithm.kl.place=loss", "algorithm.kl.target=0.01")
    run = read_run(tmp_path / "run")
    assert (run.steps, run.faults, run.pinned) == ([1, 2, 3, 4], [], {})
    assert run.checkpoints == [0, 2, 4]
    bundles = [read_bundle(tmp_path / "run", step) for step in run.steps]
    assert [b.manifest.checkpoint.name for b in bundles] == ["step_0", "step_0", "step_2", "step_2"]
    assert bundles[-1].manifest.params_sha256 == result["params_digest"]
    _, states = read_checkpoint(tmp_path / "run" / "ckpt" / "step_2")
    told = {name: value for name, value in bundles[1].manifest.state_sha256.items() if name.startswith("params/")}
    assert told == {
        f"params/{name}": tensors_digest([(f"params/{name}", tensor)])
        for name, tensor in states["model"]["params"].items()
    }
    stepped = {event.step: event for event in run.events.events if isinstance(event, StepEnded)}
    end = -1
    for bundle in bundles:
        events = bundle.manifest.events
        assert events.first_seq == end + 1 and events.last_seq == stepped[bundle.manifest.step].seq
        end = events.last_seq
        assert lines_sha256(tmp_path / "run" / "events.jsonl", events.first_seq, end) == events.sha256
        assert bundle.metrics == stepped[bundle.manifest.step].metrics
        (one,) = bundle.rounds
        assert len(one.rows) == 16 and [len(batch) for batch in one.mini_batches] == [8, 8]
        assert [sorted(i for cut in ranks for cuts in cut for i in cuts) for ranks in one.micro_batches] == [
            sorted(batch) for batch in one.mini_batches
        ]
        assert all(row.ref_logprobs is not None and row.train_logprobs is not None for row in one.rows)
        assert one.kl_coef != one.kl_coef_after
        assert (
            hashlib.sha256((tmp_path / "run" / "config.json").read_bytes()).hexdigest() == bundle.manifest.config_sha256
        )
    assert run.end is not None and run.end.first_seq == end + 1
    assert isinstance(run.events.events[run.end.last_seq], RunEnded)
    assert lines_sha256(tmp_path / "run" / "events.jsonl", end + 1, run.end.last_seq) == run.end.sha256
    assert [e.step for e in run.events.events if isinstance(e, Checkpointed)] == [0, 2, 4]


def test_a_run_that_goes_on_has_one_record_of_each_step(tmp_path):
    record(tmp_path / "run", steps=3)
    assert read_run(tmp_path / "run").checkpoints == [0, 2, 3]
    record(tmp_path / "run", "trainer.optimizer.lr=2e-4", steps=5, resume=True)
    run = read_run(tmp_path / "run")
    assert run.steps == [1, 2, 3, 4, 5] and run.faults == []
    bundles = [read_bundle(tmp_path / "run", step) for step in run.steps]
    assert [b.config["config"]["trainer"]["optimizer"]["lr"] for b in bundles] == [1e-4] * 3 + [2e-4] * 2
    assert [b.manifest.attempt for b in bundles] == [0, 0, 0, 1, 1]


def test_a_record_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    import rlctl.experience.records.writing as writing

    write = writing._write

    def full(path, data):
        if "step_00000002" in str(path) and path.name == "batch.safetensors":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(writing, "_write", full)
    record(tmp_path / "run", steps=3)
    run = read_run(tmp_path / "run")
    assert run.steps == [1, 3] and not list((tmp_path / "run" / "records").glob(".*"))
    notes = [event.message for event in run.events.events if isinstance(event, Noted)]
    assert "step 2 is not recorded: No space left on device" in notes
