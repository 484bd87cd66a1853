"""The mode that is one batch ahead on shared devices: what is cut is kept, and goes on; whole runs in this process."""

import shutil

import pytest

from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Aborted, Dispatched, Finished, Hook, SegmentMade, Selected, Stage, SyncPhase
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.session import Session
from rlctl.runtime.signals import StopSignal
from tests.trainers.sessions import Run

STEPS = 5
MODE = ("trainer.mode=colocate_async", "trainer.mini_batch_prompts=4", "rollout.max_new_tokens=64")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), *MODE, steps=STEPS)


def of(run: Run, kind: type) -> list:
    return [event for event in run.events if isinstance(event, kind)]


def test_two_runs_are_equal(run, tmp_path):
    assert Run(tmp_path, *MODE, steps=STEPS).digests == run.digests


def test_a_run_that_was_stopped_goes_on_with_what_was_cut(run, tmp_path):
    keep = ("run.checkpoint_every=1", "run.keep_checkpoints=9")
    Run(tmp_path, *MODE, *keep, steps=STEPS)
    for lost in range(3, STEPS + 1):
        shutil.rmtree(tmp_path / "ckpt" / f"step_{lost}")
    assert Run(tmp_path, *MODE, *keep, steps=STEPS, resume=True).digests == run.digests


def test_what_is_cut_is_kept_and_continued_under_new_weights(run):
    aborted = [key for event in of(run, Aborted) for key in event.keys]
    assert aborted, "nothing ran when a batch was there: the run is too small to show anything"
    finished = {(e.ordinal, e.sample) for e in of(run, Finished)}
    assert len(finished) == len(of(run, Finished)), "a response was finished twice"
    versions: dict[tuple[int, int], list[int]] = {}
    for event in of(run, SegmentMade):
        versions.setdefault((event.ordinal, event.sample), []).append(event.version)
    mixed = [key for key, seen in versions.items() if len(set(seen)) > 1]
    assert mixed and all(seen == sorted(seen) for seen in versions.values())
    assert set(mixed) <= {(ordinal, sample) for ordinal, sample, _ in aborted}


def test_one_batch_is_ahead_and_every_prompt_is_trained_once(run):
    trained = [ordinal for event in of(run, Selected) for ordinal in event.ordinals]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    dispatched = [(event.ordinal, event.version) for event in of(run, Dispatched)]
    assert [ordinal for ordinal, _ in dispatched] == list(range(4 * STEPS))
    assert [version for _, version in dispatched[:8]] == [0] * 8
    assert all(version == ordinal // 4 - 1 for ordinal, version in dispatched[8:])


def test_staleness_is_reported_and_within_its_bound(run):
    assert all(m["staleness_max"] <= 2 for m in run.metrics)
    assert max(m["staleness_max"] for m in run.metrics) >= 1
    assert all(m["staleness_tokens"] <= m["staleness"] <= m["staleness_max"] for m in run.metrics)
    assert all(0 <= m["bubble_trainer"] <= 1 and 0 <= m["bubble_rollout"] <= 1 for m in run.metrics)
    assert [m["syncs"] for m in run.metrics] == [2.0, *[1.0] * (STEPS - 1)]


def test_with_wait_nothing_is_cut(tmp_path):
    run = Run(tmp_path, *MODE, "trainer.interruption=wait", steps=3)
    assert not of(run, Aborted)
    made = [(e.ordinal, e.sample) for e in of(run, SegmentMade)]
    assert len(made) == len(set(made)), "a response was made under two versions"
    assert [m["staleness_max"] for m in run.metrics] == [0, 1, 1]


SYNC = ["wake_weights", "load", "offload_trainer", "wake_kv"]
STEP = [
    "on_step_begin", "submit", "on_sample_begin", "aborted", "on_sample_end", "generate", "reward", "balance",
    "old_log_probs", "advantages", "update_actor", *SYNC, "on_step_end",
]  # fmt: skip


def test_the_order_of_its_hooks(tmp_path):
    names: list[str] = []

    def hear(event) -> None:
        if isinstance(event, Hook | Stage | SyncPhase):
            names.append(event.phase if isinstance(event, SyncPhase) else event.name)
        elif isinstance(event, Aborted):
            names.append("aborted")

    log = EventLog(None)
    log.subscribe(hear)
    overrides = [*MODE, "run.steps=2", "run.validate_prompts=0", "trainer.prompts_per_step=4", "run.threads=1"]
    config = resolve(env={}, overrides=overrides).config
    with Session(config, find_inputs(config), log, tmp_path, StopSignal()) as session:
        session.trainer.fit()
    # At the last step nothing is ahead, so nothing is cut.
    last = [name for name in STEP if name != "aborted"]
    assert names == [*SYNC, "on_init_end", "on_train_begin", *STEP, *last, "on_train_end"]


@pytest.mark.parametrize("stage", ["submit", "generate", "reward", "update_actor"])
def test_a_stage_that_fails_brings_no_weights(tmp_path, stage):
    def fail(step):
        raise RuntimeError(f"{stage} broke")

    names: list[str] = []
    log = EventLog(None)
    log.subscribe(lambda e: names.append(e.name) if isinstance(e, Hook) else None)
    syncs: list[str] = []
    log.subscribe(lambda e: syncs.append(e.phase) if isinstance(e, SyncPhase) else None)
    config = resolve(env={}, overrides=[*MODE, "run.steps=2", "run.validate_prompts=0", "run.threads=1"]).config
    with Session(config, find_inputs(config), log, tmp_path, StopSignal()) as session:
        session.trainer._stages.table = {**session.trainer._stages.table, stage: fail}
        with pytest.raises(RuntimeError, match=f"{stage} broke"):
            session.trainer.fit()
    assert names[-2:] == ["on_step_end", "on_train_end"]
    assert syncs == SYNC
