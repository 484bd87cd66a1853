"""What modes have in common whose rollouts run beside the training, in the background."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.experience.message_queue import MessageQueue
from rlctl.trainers.base import Trainer
from rlctl.trainers.parts import Parts
from rlctl.trainers.step import StepState
from rlctl.trainers.sync_order import validates_beside
from rlctl.trainers.synchronizer import ParameterSynchronizer


class BesideTrainer(Trainer):
    """The rollouter generates in a thread of its own from ``on_train_begin`` to ``on_train_end``; weights reach it
    through a ``ParameterSynchronizer``.

    In a deterministic run it works towards a goal in each interval between two syncs, from the moment a step waits for
    its responses: the batch of this step and those that the mode has made ahead. A sync waits until it is reached, so
    that what was generated under a version does not depend on who was faster. Else it generates for as long as the
    admission allows, and held-out prompts that are due are answered while training goes on.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.deterministic = parts.config.run.deterministic
        self.synchronizer = ParameterSynchronizer(
            parts.rollouts,
            parts.rollouter,
            MessageQueue(tell=parts.events.emit),
            parts.events,
            held_out=parts.held_out,
            timeout=parts.config.sync.timeout,
        )

    def on_init_end(self) -> None:
        self.update_weights()

    def on_train_begin(self) -> None:
        if not self.deterministic:
            self.parts.rollouter.start()

    def on_sample_begin(self, step: StepState) -> None:
        if self.deterministic and step.round == 0:
            self.parts.rollouter.start(self._goal(step.number - 1))

    def on_train_end(self) -> None:
        self.parts.rollouter.stop()

    def update_weights(self) -> None:
        """Bring the replicas to the version of the last trained step, with the validation that is due."""
        if self.deterministic and self.step_number and self.parts.rollouter.running:
            self.waits.until(self.parts.rollouter.held)
        validate = self.validates_beside()
        self.count_sync(
            self.synchronizer.sync_weights(self.step_number, validate, self.step_number, use_trainer_do_validate=True)
        )
        if self.deterministic:
            self.synchronizer.wait_last_valid()
        self._file_validations()

    def validates_beside(self) -> bool:
        parts = self.parts
        return validates_beside(parts.config, len(parts.held_out), step=self.step_number, steps=parts.total_steps)

    def finish_validations(self) -> None:
        self.synchronizer.wait_last_valid()
        self._file_validations()

    def _file_validations(self) -> None:
        for message in self.synchronizer.queue.drain():
            self.file_validation(message.content.global_steps, message.content.found)

    def _goal(self, version: int) -> Callable[[], bool]:
        buffer = self.parts.buffer
        wanted = buffer.goal(version, int(self.parts.config.trainer.warmup_batches or 0))
        return lambda: buffer.selected + buffer.prefix() >= wanted
