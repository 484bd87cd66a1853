"""Strictly on-policy: generate, then train, then bring the new weights to the replicas."""

from __future__ import annotations

from rlctl.trainers.base import Trainer
from rlctl.trainers.step import StepState


class SyncTrainer(Trainer):
    """Each step trains exactly the prompts that it submitted, all made under the weights of the step before."""

    def on_init_end(self) -> None:
        self.update_weights()

    def on_sample_end(self, step: StepState) -> None:
        self.parts.rollouts.sleep()

    def on_step_end(self, step: StepState) -> None:
        if step.error is None:
            step.time("sync", self.update_weights)
