"""Modes whose rollouts run beside the trainer: their order, their staleness, and runs that are equal bit for bit."""

import functools
import inspect
import shutil
import threading
import time
from collections.abc import Callable

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.events import Finished, Hook, Noted, SegmentMade, Selected, Stage, Switched, SyncPhase, Validated
from rlctl.runtime.watchdog import StalledError, Watchdog
from rlctl.trainers import waiting
from rlctl.trainers.modes import one_step_off, separate_async
from rlctl.trainers.switching import LendDecision, LendInputs, decide
from tests.trainers.sessions import Run
from tests.trainers.threaded import LAYOUT, ThreadedGroup, threaded

__all__ = ["threaded"]  # the fixture

ONE = ("trainer.mode=one_step_off", *LAYOUT, "trainer.mini_batch_prompts=4")
SEPARATE = ("trainer.mode=separate_async", *LAYOUT, "trainer.mini_batch_prompts=2", "trainer.parameter_sync_step=2")
STRICT = (
    "trainer.mode=separate_async", *LAYOUT, "trainer.mini_batch_prompts=4", "trainer.parameter_sync_step=1",
    "trainer.warmup_batches=0", "trainer.max_staleness=0", "trainer.old_log_probs=recompute",
)  # fmt: skip
SYNC = ("trainer.mode=sync", "trainer.mini_batch_prompts=4", "trainer.old_log_probs=recompute")
SAME = "run.deterministic=true"
EDGES = ["pause", "version", "transfer", "update"]


def of(run: Run, kind: type) -> list:
    return [event for event in run.events if isinstance(event, kind)]


def trace(run: Run) -> list[str]:
    return [
        event.phase if isinstance(event, SyncPhase) else event.name
        for event in run.events
        if isinstance(event, Hook | Stage | SyncPhase)
    ]


def trained(run: Run) -> list[int]:
    return [ordinal for event in of(run, Selected) for ordinal in event.ordinals]


def test_one_step_off_is_one_short_file():
    assert len(inspect.getsource(one_step_off).splitlines()) <= 60


def test_one_step_off_trains_every_token_exactly_one_version_later(threaded, tmp_path):
    run = Run(tmp_path, *ONE, steps=4)
    assert [m["staleness_max"] for m in run.metrics] == [0, 1, 1, 1]
    assert all(m["staleness_tokens"] == m["staleness_max"] for m in run.metrics)
    assert trained(run) == list(range(16))
    segments = of(run, SegmentMade)
    assert len({(e.ordinal, e.sample) for e in segments}) == len(segments), "a response was made under two versions"


STAGES = ["reward", "balance", "old_log_probs", "advantages", "update_actor"]
SAMPLE = ["on_sample_begin", "on_sample_end", "generate"]


def test_the_order_of_one_step_off(threaded, tmp_path):
    step = ["on_step_begin", "submit", *SAMPLE, *STAGES, *EDGES, "on_step_end"]
    run = Run(tmp_path, *ONE, steps=2)
    assert trace(run) == [*EDGES, "on_init_end", "on_train_begin", *step, *step, "on_train_end"]


def test_the_order_of_separate_async(threaded, tmp_path):
    step = ["on_step_begin", "submit", *(SAMPLE + STAGES) * 2, *EDGES, "on_step_end"]
    run = Run(tmp_path, *SEPARATE, steps=2)
    assert trace(run) == [*EDGES, "on_init_end", "on_train_begin", *step, *step, "on_train_end"]
    assert [m["updates"] for m in run.metrics] == [2, 2] and [m["prompts"] for m in run.metrics] == [4, 4]


@pytest.mark.parametrize("mode", [ONE, SEPARATE], ids=["one_step_off", "separate_async"])
@pytest.mark.parametrize("broken", ["generate", "update_actor"])
def test_a_stage_that_fails_ends_the_threads_and_brings_no_weights(threaded, tmp_path, monkeypatch, mode, broken):
    from rlctl.trainers.stages import Stages
    from rlctl.trainers.training import TrainingStages

    def fail(self, step):
        raise RuntimeError(f"{broken} broke")

    monkeypatch.setattr(Stages if broken == "generate" else TrainingStages, broken, fail)
    stopped = []
    monkeypatch.setattr(Run, "failed", lambda self, session: stopped.append(session.parts.rollouter.running))
    with pytest.raises(RuntimeError, match=f"{broken} broke"):
        Run(tmp_path, *mode, steps=2)
    assert stopped == [False]


@pytest.mark.parametrize("mode", [ONE, SEPARATE], ids=["one_step_off", "separate_async"])
def test_deterministic_runs_are_equal_also_when_one_is_stopped_and_goes_on(threaded, tmp_path, mode):
    keep = ("run.checkpoint_every=1", "run.keep_checkpoints=9")
    first = Run(tmp_path / "a", *mode, SAME, steps=4)
    second = Run(tmp_path / "b", *mode, SAME, *keep, steps=4)
    assert first.digests == second.digests
    for lost in (3, 4):
        shutil.rmtree(tmp_path / "b" / "ckpt" / f"step_{lost}")
    assert Run(tmp_path / "b", *mode, SAME, *keep, steps=4, resume=True).digests == first.digests


def test_sync_is_separate_async_without_anything_ahead(threaded, tmp_path):
    strict = Run(tmp_path / "b", *STRICT, SAME, steps=3)
    assert max(m["staleness_max"] for m in strict.metrics) == 0
    assert Run(tmp_path / "a", *SYNC, *LAYOUT, SAME, steps=3).digests == strict.digests


def test_staleness_of_separate_async_is_within_its_bound_and_nothing_is_lost(threaded, tmp_path):
    run = Run(tmp_path, *SEPARATE, "trainer.max_staleness=2", "rollout.max_new_tokens=48", steps=8)
    assert 1 <= max(m["staleness_max"] for m in run.metrics) <= 2
    assert len(trained(run)) == len(set(trained(run))) == 32
    finished = [(e.ordinal, e.sample) for e in of(run, Finished)]
    assert len(finished) == len(set(finished))


def test_decoupled_updates_are_against_the_policy_of_the_last_sync(threaded, tmp_path, monkeypatch):
    from rlctl.trainers.training import TrainingStages

    seen: list[tuple[int, float]] = []
    inner = TrainingStages.advantages

    def advantages(self, step):
        if self._config.trainer.parameter_sync_step == 2 and step.round:
            now = self._model.log_probs(step.rows, temperature=1.0)
            old = [row.old_logprobs for row in step.rows]
            kept = self._model.kept_log_probs(step.rows, temperature=1.0)
            assert all((a == b).all() for a, b in zip(old, kept, strict=True))
            seen.append((step.number, max(float(abs(a - b).max()) for a, b in zip(old, now, strict=True))))
        inner(self, step)

    monkeypatch.setattr(TrainingStages, "advantages", advantages)
    # The higher rate makes every update one that shows.
    rate = ("trainer.optimizer.lr=1e-2", "trainer.old_log_probs=recompute", "algorithm.normalize_std=false")
    run = Run(tmp_path, *SEPARATE, *rate, "algorithm.advantage=reinforce_pp", steps=3)
    assert [step for step, _ in seen] == [1, 2, 3]
    assert max(gap for _, gap in seen) > 1e-4, "no update moved the policy: nothing is shown"
    assert len(run.metrics) == 3


def test_held_out_prompts_are_answered_while_training_goes_on(threaded, tmp_path):
    run = Run(tmp_path, *SEPARATE, "run.validate_prompts=8", "run.validate_every=1", steps=3)
    assert sorted(event.step for event in of(run, Validated)) == [0, 1, 2, 3]
    # Before and after only: those in between run beside the steps, without hooks.
    assert [name for name in trace(run) if name == "on_validate_begin"] == ["on_validate_begin"] * 2


def test_devices_are_lent_between_steps_and_for_validations(threaded, tmp_path, monkeypatch):
    threaded.hybrids = 1
    groups: list[ThreadedGroup] = []
    inner = threaded.__init__

    def init(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        groups.append(self)

    threaded.__init__ = init
    always = LendDecision(True, "a test wants it", 1.5)
    monkeypatch.setattr(separate_async, "decide", lambda inputs: always)
    more = ("placement.hybrid_replicas=1", "run.validate_prompts=4", "run.validate_every=2")
    run = Run(tmp_path, *SEPARATE, *more, steps=3)
    assert groups[0].calls == [
        "sync 0", "lend 0", "take back",  # the validation before the first step
        "lend 0", "take back", "sync 1", "lend 1", "take back", "sync 2",
        "lend 2", "take back",  # the validation that is due
        "lend 2", "take back", "sync 3", "lend 3", "take back",
    ]  # fmt: skip
    switched = of(run, Switched)
    assert [event.to for event in switched] == ["rollout", "trainer"] * 3
    inputs = switched[0].inputs
    assert {"wanted": 2, "standalone": 1, "hybrids": 1, "slots": 64, "gain": 1.5}.items() <= inputs.items()
    assert inputs["under_way"] > 0 and "seconds" in switched[1].inputs
    assert all(m["switch_lent"] == 1 and m["switch_gain_seconds"] == 1.5 for m in run.metrics)


def test_whether_to_lend_is_decided_by_what_was_measured(threaded, tmp_path, monkeypatch):
    threaded.hybrids = 1
    asked: list[LendInputs] = []
    monkeypatch.setattr(separate_async, "decide", lambda inputs: asked.append(inputs) or decide(inputs))
    run = Run(tmp_path, *SEPARATE, "placement.hybrid_replicas=1", "rollout.max_slots=2", steps=3)
    assert [m["switch_lent"] for m in run.metrics] == [float(decide(inputs).lend) for inputs in asked]
    assert len(asked) == 3 and asked[0].rate is None and asked[0].cost is None
    lent = [event for event in of(run, Switched) if event.to == "rollout"]
    assert len(lent) == sum(decide(inputs).lend for inputs in asked)


def test_a_sync_that_fails_leaves_no_thread(threaded, tmp_path, monkeypatch):
    def fail(self, version):
        if version == 1:
            raise RlctlError("the wire is cut")
        return inner(self, version)

    inner = threaded.sync_weights
    monkeypatch.setattr(threaded, "sync_weights", fail)
    stopped = []
    monkeypatch.setattr(Run, "failed", lambda self, session: stopped.append(session.parts.rollouter.running))
    with pytest.raises(RlctlError, match="the wire is cut"):
        Run(tmp_path, *SEPARATE, steps=2)
    assert stopped == [False]


@pytest.mark.parametrize("mode", [ONE, SEPARATE, STRICT], ids=["one_step_off", "separate_async", "strict"])
def test_an_epochs_tail_is_trained_as_a_shorter_batch(threaded, tmp_path, mode):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"prompt": "{n} ", "answer": "{n}"}}\n' for n in range(10)))
    data = (f"task.name={file}", "task.verifier=contains", "task.held_out=0", "task.epochs=1")
    run = Run(tmp_path, *mode, *data, steps=50)
    assert [m["prompts"] for m in run.metrics] == [4, 4, 2]
    assert sorted(trained(run)) == list(range(10))


def freeze(group: type[ThreadedGroup], thaws: bool) -> Callable[[], bool]:
    """Have the engine return nothing any more, after it was given something, until an abort if ``thaws``.

    Returns:
        Whether there is something that it does not return.
    """
    inner = group.__init__
    frozen, holding = threading.Event(), threading.Event()
    frozen.set()

    def init(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        engine = self.engine

        def step(_):
            if frozen.is_set():
                holding.set()
                time.sleep(0.005)
                return []
            return type(engine).__mro__[1].step(_)

        def abort(_, keys=None):
            if thaws:
                frozen.clear()
            return type(engine).__mro__[1].abort(_, keys)

        engine.__class__ = type("Frozen", (type(engine),), {"step": step, "abort": abort})

    group.__init__ = init
    return lambda: holding.is_set() and frozen.is_set()


def test_an_engine_that_returns_nothing_is_asked_again(threaded, tmp_path, monkeypatch):
    holding = freeze(threaded, thaws=True)
    seen = [time.monotonic(), 0.0]

    def clock() -> float:
        """Patience ends soon while the engine holds what it was given, and not for a machine that is busy."""
        now = time.monotonic()
        seen[1] += (now - seen[0]) * (1000.0 if holding() else 1.0)
        seen[0] = now
        return seen[1]

    monkeypatch.setattr(waiting, "Watchdog", functools.partial(Watchdog, clock=clock))
    run = Run(tmp_path, *SEPARATE, "trainer.stall_timeout=100", "task.reward_timeout=90", steps=2)
    told = [event.message for event in of(run, Noted) if "queued again" in event.message]
    assert len(told) == 1 and "waits for 4 of 4 responses" in told[0] and "replicas: 0 serves version 0" in told[0]
    assert trained(run) == list(range(8))


def test_a_wait_for_what_never_comes_ends(threaded, tmp_path):
    freeze(threaded, thaws=False)
    with pytest.raises(StalledError, match="nothing was generated for 200 ms, twice"):
        Run(tmp_path, *SEPARATE, "trainer.stall_timeout=0.2", "task.reward_timeout=0.1", steps=2)
