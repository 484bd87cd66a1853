"""A run's folder as its past."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.events import Event, Hook, RunEnded, RunStarted, Stage
from rlctl.experience.records.manifest import Failure
from rlctl.ops.replay.choice import chosen_steps
from rlctl.ops.replay.history import read_history
from rlctl.ops.replay.listing import list_run
from rlctl.ops.replay.samples import samples_of
from rlctl.ops.replay.showing import show_run
from rlctl.ops.replay.texts import decoder_of
from rlctl.ops.replay.timeline import timeline
from tests.ops.replay.told import step_events, write_config, write_events, write_run


def test_steps_and_their_samples_come_from_the_events(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run"))
    assert list(history.steps) == [1, 2, 3, 4]
    first, second = samples_of(history.steps[3], None, None)
    assert (first.ordinal, first.sample, first.reward, first.tokens, first.versions) == (3, 0, 1.0, 4, [2])
    assert second.versions == [1, 2]
    assert list(second.staleness) == [1, 1, 1, 0, 0]
    assert [(p.tokens, p.replica) for p in second.pieces] == [(3, "1"), (2, "0")]


def test_work_that_was_done_again_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = read_history(run)
    ended = next(e.seq for e in before.events if getattr(e, "step", 0) == 2 and type(e).__name__ == "StepEnded")
    write_events(run, [RunStarted(mode="sync", seed=0, from_step=2, from_seq=ended), *step_events(3)], 1, 5000.0)
    history = read_history(run)
    assert list(history.steps) == [1, 2, 3]
    assert history.steps[3].attempt == 1
    assert len(history.steps[3].samples) == 2
    assert [a.from_step for a in history.attempts] == [0, 2]


def test_a_cut_last_line_is_told_and_the_rest_is_used(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = run / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines)[:-10])
    history = read_history(run)
    assert list(history.steps) == [1, 2, 3]
    assert f"line {len(lines)}" in history.faults[0].what


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="no run folder"):
            read_history(place)
    (tmp_path / "config.json").write_text('{"schema": "rlctl.config/1", "config": {"run": {"seed": "x"}}}')
    with pytest.raises(RlctlError):
        read_history(tmp_path)


def test_the_listing_says_what_is_kept_and_its_size(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    kept = run / "ckpt" / "step_4"
    kept.mkdir(parents=True)
    (kept / "tensors.safetensors").write_bytes(b"x" * 1000)
    history = read_history(run)
    listing = list_run(history, history.known)
    assert [step.step for step in list_run(history, [2]).steps] == [2]
    assert [s.kept for s in listing.steps] == [["events"]] * 3 + [["events", "checkpoint"]]
    assert listing.steps[-1].nbytes == 1000
    assert listing.sizes["checkpoints"] == 1000
    assert listing.sizes["events"] == (run / "events.jsonl").stat().st_size


def test_the_timeline_has_each_replica_and_the_trainer(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run"))
    line = timeline(history.events)
    lanes = {lane.name: lane for lane in line.lanes}
    assert set(lanes) == {"trainer", "weight sync", "replica 0", "replica 1"}
    assert lanes["weight sync"].busy == pytest.approx(4 * 0.25)
    assert {span.version for span in lanes["replica 1"].spans} == {0, 1, 2}
    assert all(lane.busy <= line.seconds for lane in line.lanes)
    assert list(line.ends) == [1, 2, 3, 4]
    some = timeline(history.events, 3, 3)
    assert list(some.ends) == [3]
    assert some.begin == line.ends[2]


def test_chosen_steps_are_shown_and_their_samples_bounded(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run"))
    shown = show_run(history, chosen_steps(history, list(history.steps), 2, 3), 1)
    assert [(s.step.step, len(s.samples), s.total) for s in shown.steps] == [(2, 1, 2), (3, 1, 2)]
    assert shown.steps[1].ages == {0: 6, 1: 3}
    with pytest.raises(UsageError, match="steps 1 to 4"):
        chosen_steps(history, list(history.steps), 9, None)
    with pytest.raises(UsageError, match="no step was odd"):
        chosen_steps(history, list(history.steps), None, None, anomalies=True)


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        read_history(tmp_path / ("a" * 5000))


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, "\x00", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_leaves_the_models_own(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run")
    (run / "final").mkdir()
    (run / "final" / "tokenizer.json").write_text(text)
    decode = decoder_of(read_history(run))
    assert decode is not None
    assert decode([20, 21])
    assert "not a tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("last", "failure"),
    [
        ([Stage(name="reward", step=2, error="no reward\n  mend it"), RunEnded(step=1, status="failed", error="x")],
         Failure("reward", 0, "no reward")),
        ([Stage(name="reward", step=2), Stage(name="reward", step=2, error="no"), RunEnded(step=1, status="failed")],
         Failure("reward", 1, "no")),
        ([Hook(name="on_step_end", step=2, error="no sync"), RunEnded(step=1, status="failed")],
         Failure("on_step_end", 0, "no sync")),
        ([Stage(name="reward", step=2, error="KeyboardInterrupt"), RunEnded(step=1, status="interrupted")], None),
        ([Stage(name="reward", step=2, error="stopped by SIGTERM"), RunEnded(step=1, status="preempted")], None),
        ([], None),
    ],
    ids=["failed", "second-update", "hook", "interrupted", "preempted", "killed"],
)  # fmt: skip
def test_a_step_without_an_end_failed_only_where_an_error_ended_the_run(
    last: list[Event], failure: Failure | None, tmp_path: Path
) -> None:
    write_config(tmp_path)
    begun = step_events(2)[:-3]  # up to the stage generate
    assert isinstance(begun[-1], Stage)
    write_events(tmp_path, [RunStarted(mode="sync", seed=0), *step_events(1), *begun, *last])
    history = read_history(tmp_path)
    assert (list(history.steps), history.known) == ([1], [1, 2])
    assert history.failed == ({2: failure} if failure else {})
    assert history.told == ([1, 2] if failure else [1])
    (_, step) = list_run(history, history.known).steps
    assert (step.ended, step.failure, step.samples) == (False, failure, 2)
