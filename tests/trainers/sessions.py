"""Whole runs in this process: the built-in task and model, a few prompts a step."""

from __future__ import annotations

from pathlib import Path

from rlctl.config import Layer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Event, StepEnded
from rlctl.ops.inputs import find_inputs
from rlctl.ops.resolve import resolve
from rlctl.ops.session import Session
from rlctl.runtime.signals import StopSignal

SMALL = {
    "trainer.prompts_per_step": 4,
    "trainer.mini_batch_prompts": 2,
    "trainer.optimizer.lr": 1e-4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 24,
    "run.validate_prompts": 0,
    "run.threads": 1,
    "run.checkpoint_every": 0,
}


class Run:
    """A run of ``steps`` steps that keeps its events.

    Attributes:
        events: all of them.
        metrics: of each step.
        digests: of the actor's parameters, and of the critic's where there is one.
    """

    def __init__(self, folder: Path, *overrides: str, steps: int = 2, resume: bool = False) -> None:
        self.events: list[Event] = []
        log = EventLog(None)
        log.subscribe(self.events.append)
        resolution = resolve(env={}, layers=[Layer("small", SMALL)], overrides=[f"run.steps={steps}", *overrides])
        resolution.require_valid()
        config = resolution.config
        with Session(config, find_inputs(config), log, folder / "ckpt", StopSignal()) as session:
            if resume:
                session.trainer.resume()
            try:
                session.trainer.fit()
            except BaseException:
                self.failed(session)
                raise
            parts = session.parts
            self.digests = [parts.model.params_digest()]
            if parts.critic is not None:
                self.digests.append(parts.critic.params_digest())
            self.kl_coef = parts.algorithm.kl.value

    def failed(self, session: Session) -> None:
        """Look at a run that failed, before it is taken down."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [event.figures for event in self.events if isinstance(event, StepEnded)]
