"""The next whole batch is made while this one is trained: every token is trained exactly one version later."""

from __future__ import annotations

from rlctl.trainers.beside import BesideTrainer
from rlctl.trainers.step import StepState


class OneStepOffTrainer(BesideTrainer):
    """A step begins with its batch whole and the rollouts busy with the next one, under the weights that it begins
    with. It ends when that one is whole too, so that no response is ever made under two versions. (The first step
    makes its own batch and the next.)"""

    def on_sample_end(self, step: StepState) -> None:
        """The rollouts go on."""

    def on_step_end(self, step: StepState) -> None:
        if step.error is None:
            step.time("wait_ahead", lambda: self.waits.until(self._all_whole))
            step.time("sync", self.update_weights)

    def _all_whole(self) -> bool:
        return not self.parts.buffer.unfinished()
