"""The order of hooks and stages, also when any one of them fails. Real model, real engine, the built-in task."""

from collections.abc import Iterator

import pytest

from rlctl.errors import PreemptedError, UsageError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Hook, RunEnded, Stage, SyncPhase
from rlctl.ops.inputs import find_inputs
from rlctl.ops.session import Session
from rlctl.runtime.signals import StopSignal
from rlctl.schema import Config
from rlctl.trainers import get_trainer_cls, register_trainer
from rlctl.trainers.base import Trainer
from rlctl.trainers.modes.sync import SyncTrainer
from rlctl.trainers.registry import TRAINERS
from rlctl.trainers.step import HOOKS, STAGES

RUN_STAGES = ["submit", "generate", "reward", "balance", "old_log_probs", "advantages", "update_actor"]
STEP = [
    "on_step_begin", "submit", "on_sample_begin", "on_sample_end", "generate", *RUN_STAGES[2:],
    "wake_weights", "load", "offload_trainer", "wake_kv", "on_step_end",
]  # fmt: skip
VALIDATE = ["on_validate_begin", "on_validate_end"]
SYNC = ["wake_weights", "load", "offload_trainer", "wake_kv"]
WHOLE = [*SYNC, "on_init_end", *VALIDATE, "on_train_begin", *STEP, *STEP, *VALIDATE, "on_train_end"]


def small_config(steps: int = 2) -> Config:
    config = Config()
    config.trainer.prompts_per_step = 2
    config.trainer.parameter_sync_step = 1
    config.trainer.old_log_probs = "recompute"
    config.rollout.samples_per_prompt = 2
    config.rollout.max_new_tokens = 8
    config.run.steps = steps
    config.run.validate_prompts = 4
    config.run.threads = 1
    return config


class Traced:
    """A session whose events are kept as names: hooks when they return, stages and sync phases when they end."""

    def __init__(self, tmp_path, config: Config) -> None:
        self.names: list[str] = []
        self.errors: dict[str, str] = {}
        self.ended: list[RunEnded] = []
        log = EventLog(None)
        log.subscribe(self.hear)
        self.stop = StopSignal()
        self.session = Session(config, find_inputs(config), log, tmp_path / "ckpt", self.stop)
        self.trainer = self.session.trainer

    def hear(self, event) -> None:
        name = event.phase if isinstance(event, SyncPhase) else getattr(event, "name", None)
        if isinstance(event, Hook | Stage | SyncPhase):
            self.names.append(name)
            if event.error:
                self.errors[name] = event.error
        if isinstance(event, RunEnded):
            self.ended.append(event)


@pytest.fixture
def traced(tmp_path) -> Iterator[Traced]:
    one = Traced(tmp_path, small_config())
    with one.session:
        yield one


def test_there_are_ten_stages_and_nine_hooks_and_two_of_these_are_abstract():
    assert len(STAGES) == 10 and len(HOOKS) == 9
    assert all(hasattr(Trainer, name) for name in HOOKS)
    assert Trainer.__abstractmethods__ == {"on_step_end", "on_sample_end"}


def test_sync_mode_runs_in_this_order(traced):
    traced.trainer.fit()
    assert traced.names == WHOLE
    assert [e.status for e in traced.ended] == ["done"]


def closed(names: list[str]) -> bool:
    """Whether every begin has its end, properly nested."""
    open_ones = []
    for name in names:
        if name in HOOKS and name.endswith("_begin"):
            open_ones.append(name.removesuffix("_begin"))
        elif name in HOOKS and name.endswith("_end") and name != "on_init_end":
            last = open_ones.pop() if open_ones else ""
            if last != name.removesuffix("_end"):
                return False
    return not open_ones


@pytest.mark.parametrize("stage", RUN_STAGES)
def test_a_stage_that_fails_closes_everything(traced, stage):
    def fail(step):
        raise RuntimeError(f"{stage} broke")

    traced.trainer._stages.table = {**traced.trainer._stages.table, stage: fail}
    with pytest.raises(RuntimeError, match=f"{stage} broke"):
        traced.trainer.fit()
    assert closed(traced.names)
    assert traced.names[-2:] == ["on_step_end", "on_train_end"]
    assert traced.errors == {stage: f"{stage} broke"}
    position = RUN_STAGES.index(stage)
    after_begin = traced.names[traced.names.index("on_train_begin") :]
    assert [n for n in after_begin if n in STAGES] == RUN_STAGES[: position + 1]
    # A step that failed brings no weights to the replicas: only the sync of the start is there.
    assert [n for n in traced.names if n in SYNC] == SYNC
    assert [(e.status, e.error) for e in traced.ended] == [("failed", f"{stage} broke")]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_closes_everything(tmp_path, hook):
    traced = Traced(tmp_path, small_config(steps=1))
    with traced.session:

        def fail(*args):
            raise RuntimeError(f"{hook} broke")

        setattr(traced.trainer, hook, fail)
        with pytest.raises(RuntimeError, match=f"{hook} broke"):
            traced.trainer.fit()
    assert closed(traced.names)
    assert traced.errors[hook] == f"{hook} broke"
    if hook not in ("on_init_end", "on_validate_begin", "on_validate_end"):
        assert traced.names[-1] == "on_train_end"
    assert [e.status for e in traced.ended] == ["failed"]


def test_when_an_end_fails_too_the_first_error_is_the_one_raised(traced):
    def fail(step):
        raise RuntimeError("the cause")

    def also(step):
        raise ValueError("a consequence")

    traced.trainer._stages.table = {**traced.trainer._stages.table, "reward": fail}
    traced.trainer.on_step_end = also
    with pytest.raises(RuntimeError, match="the cause") as caught:
        traced.trainer.fit()
    assert any("a consequence" in note for note in caught.value.__notes__)
    assert traced.names[-1] == "on_train_end"


def test_a_signal_stops_at_the_step_boundary_with_a_checkpoint(traced, tmp_path):
    traced.stop.requested = "SIGTERM"
    with pytest.raises(PreemptedError, match="SIGTERM after step 1 of 2") as caught:
        traced.trainer.fit()
    assert caught.value.exit_code == 75
    assert (tmp_path / "ckpt" / "step_1" / "state.json").exists()
    assert traced.names == [*WHOLE[: WHOLE.index("on_train_begin") + 1], *STEP, "on_train_end"]
    assert [e.status for e in traced.ended] == ["preempted"]


def test_a_stranger_registers_a_mode_and_takes_no_name_that_is_taken(monkeypatch):
    monkeypatch.setattr(TRAINERS, "_registered", {})

    @register_trainer("in-a-test")
    class Mode(SyncTrainer):
        """A mode of a test."""

    assert get_trainer_cls("in-a-test") is Mode
    assert register_trainer("in-a-test")(Mode) is Mode
    with pytest.raises(UsageError, match="registered already"):
        register_trainer("in-a-test")(type("Other", (SyncTrainer,), {}))
    with pytest.raises(UsageError, match="registered already"):
        register_trainer("sync")(Mode)
    with pytest.raises(UsageError, match="subclass of Trainer"):
        register_trainer("no-trainer")(int)
    with pytest.raises(UsageError, match="did you mean 'sync'"):
        get_trainer_cls("synk")
