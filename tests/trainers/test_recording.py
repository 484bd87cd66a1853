"""What a run records: every step, all that it stood on, and no more than the window."""

import hashlib

import pytest

from rlctl.errors import UsageError
from rlctl.experience.events import Checkpointed, Noted, RunEnded, Selected, StepEnded
from rlctl.experience.records.reading import lines_sha256, read_bundle, read_run
from rlctl.model.digest import tensors_digest
from rlctl.runtime.checkpoints import read_checkpoint
from tests.trainers.threaded import LAYOUT, threaded

from .recorded import record

__all__ = ["threaded"]  # the fixture

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


def test_work_that_was_lost_with_a_killed_attempt_loses_its_record(tmp_path, monkeypatch):
    from rlctl.trainers.recording import Recorder

    end_step = Recorder.end_step

    def dies(self, step, *rest):
        if step == 4:
            raise KeyError("killed")
        end_step(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "end_step", dies)
        with pytest.raises(KeyError):
            record(tmp_path / "run", steps=5)
    assert read_run(tmp_path / "run").steps == [1, 2, 3] and read_run(tmp_path / "run").checkpoints == [0, 2]
    record(tmp_path / "run", steps=5, resume=True)
    bundles = [read_bundle(tmp_path / "run", step) for step in read_run(tmp_path / "run").steps]
    assert [(b.manifest.step, b.manifest.attempt) for b in bundles] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    events = tmp_path / "run" / "events.jsonl"
    for told in (bundle.manifest.events for bundle in bundles):
        assert lines_sha256(events, told.first_seq, told.last_seq) == told.sha256


def test_odd_steps_stay_and_others_leave_with_the_window(tmp_path):
    words = ("run.record_window=2", "run.checkpoint_every=1", "run.keep_checkpoints=1", "run.record_pins=2")
    record(tmp_path / "plain", *words, steps=5)
    run = read_run(tmp_path / "plain")
    assert run.steps == [4, 5] and run.checkpoints == [3, 4, 5] and run.pinned == {}
    read_bundle(tmp_path / "plain", 4)
    # No reward is above 2: every step is odd, and the latest two stay pinned.
    record(tmp_path / "odd", *words, "run.record_keep=[reward=2..]", "run.record_window=1", steps=5)
    odd = read_run(tmp_path / "odd")
    assert sorted(odd.pinned) == [4, 5] and {4, 5} <= set(odd.steps)
    assert {3, 4} <= set(odd.checkpoints) and odd.pinned[5].checkpoint == 4
    assert odd.pinned[4].why[0].startswith("reward ")
    notes = [event.message for event in odd.events.events if isinstance(event, Noted)]
    assert sum("stays recorded: reward" in note for note in notes) == 5


def test_off_writes_no_events_and_goes_on(tmp_path):
    record(tmp_path / "run", "run.record=off", steps=2)
    assert not (tmp_path / "run" / "events.jsonl").exists() and not (tmp_path / "run" / "records").exists()
    assert record(tmp_path / "run", steps=3, resume=True)["steps"] == 3


def test_a_band_that_is_none_is_refused_before_the_run_begins(tmp_path):
    with pytest.raises(UsageError, match="is no band of a figure"):
        record(tmp_path / "run", "run.record_keep=[loss]")
    assert not (tmp_path / "run").exists()


BESIDE = {
    "colocate_async": (),
    "one_step_off": (*LAYOUT, "trainer.mini_batch_prompts=4"),
    "separate_async": (*LAYOUT, "trainer.mini_batch_prompts=2", "trainer.parameter_sync_step=2"),
}


@pytest.mark.parametrize("mode", BESIDE)
def test_every_mode_records_its_steps(mode, tmp_path, request):
    if mode != "colocate_async":
        request.getfixturevalue("threaded")
    words = (f"trainer.mode={mode}", *BESIDE[mode])
    result = record(tmp_path / "run", *words, steps=3)
    run = read_run(tmp_path / "run")
    assert run.steps == [1, 2, 3] and run.faults == []
    selected = [event.ordinals for event in run.events.events if isinstance(event, Selected)]
    end, taken = -1, []
    for bundle in (read_bundle(tmp_path / "run", step) for step in run.steps):
        told = bundle.manifest.events
        assert told.first_seq == end + 1
        end = told.last_seq
        assert lines_sha256(tmp_path / "run" / "events.jsonl", told.first_seq, end) == told.sha256
        assert len(bundle.rounds) == (2 if mode == "separate_async" else 1)
        for one in bundle.rounds:
            taken.append([group.ordinal for group in one.groups])
            assert all(
                row.train_logprobs is not None and len(row.advantages) == len(row.response_ids) for row in one.rows
            )
            for row, spans in zip(one.rows, one.segments, strict=True):
                assert spans[-1].end == len(row.response_ids) and spans[0].version == row.versions[0]
        chosen = [decision["ordinals"] for decision in bundle.manifest.decisions if decision["kind"] == "selected"]
        assert chosen == taken[-len(bundle.rounds) :]
    assert taken == selected
    assert bundle.manifest.params_sha256 == result["params_digest"]


def test_ranks_record_each_ones_passes(tmp_path):
    words = ("cluster.devices_per_node=2", "placement.trainer_ranks=2")
    result = record(tmp_path / "run", *words, "run.record=full", steps=1)
    bundle = read_bundle(tmp_path / "run", 1)
    (one,) = bundle.rounds
    assert bundle.manifest.layout["trainer_ranks"] == 2
    for batch, ranks in zip(one.mini_batches, one.micro_batches, strict=True):
        assert len(ranks) == 2 and sorted(i for cuts in ranks for cut in cuts for i in cut) == sorted(batch)
    assert bundle.manifest.params_sha256 == result["params_digest"]
    assert len(bundle.manifest.state_sha256) % 3 == 0 and "params/model.norm.weight" in bundle.manifest.state_sha256
