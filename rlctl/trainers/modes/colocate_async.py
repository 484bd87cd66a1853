"""One batch ahead on shared devices: what still runs when a batch is there is cut, kept and continued."""

from __future__ import annotations

from rlctl.trainers.base import Trainer
from rlctl.trainers.step import StepState


class ColocateAsyncTrainer(Trainer):
    """A step waits for as many groups as it trains, of the more that are under way. The others stop where they are
    while the devices train, and go on under the new weights (``trainer.interruption: abort``). With ``wait`` they are
    made whole first. With ``keep``, where the rollouts have devices of their own, they go on until the sync.
    """

    def on_init_end(self) -> None:
        self.update_weights()

    def on_sample_end(self, step: StepState) -> None:
        interruption = self.parts.config.trainer.interruption
        if interruption == "wait" and step.error is None:
            self.waits.until(lambda: not self.parts.buffer.unfinished())
        elif interruption != "keep":
            self.parts.rollouts.abort()
        self.parts.rollouts.sleep()

    def on_step_end(self, step: StepState) -> None:
        if step.error is None:
            step.time("sync", self.update_weights)
