"""The training loop. It never branches on the mode: a mode is a subclass that fills in hooks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from rlctl.errors import PreemptedError, RlctlError
from rlctl.experience.events import Hook, Noted, RunEnded, Signalled, Stage, StepEnded, Validated
from rlctl.experience.figures import figures_out
from rlctl.rollout.rollouter import Evaluation
from rlctl.sync.report import SyncReport
from rlctl.trainers.figures import SyncTotals, step_figures
from rlctl.trainers.parts import MeasuredRollouts, Parts
from rlctl.trainers.rounds import metrics_of_step
from rlctl.trainers.saving import Saved
from rlctl.trainers.stages import Stages
from rlctl.trainers.standing import tell_standing
from rlctl.trainers.step import STAGES, StepState
from rlctl.trainers.waiting import Waits

# So many steps in a row without an update mean that none will come.
MOST_SKIPPED = 5


class Trainer(Saved, ABC):
    """One run.

    Order: on_init_end; evaluation; on_train_begin; steps; on_train_end. A step: on_step_begin; the stages, with
    on_sample_begin/end around the sampling; on_step_end; then the checkpoint and the evaluation that are due. Every
    begin has its end, also when something fails in between; the error that came first is the one raised.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.waits = Waits(parts)
        self._stages = Stages(parts, self.waits, on_sample=self._sampling)
        self._skipped = 0
        self._data_ended = False
        self._syncs = SyncTotals()

    # Hooks, in the order in which they first run. Only the two that every mode must think about are abstract.

    def on_init_end(self) -> None:
        """The parts are built and the checkpoint, if any, is loaded."""

    def on_validate_begin(self) -> None:
        """Held-out prompts are about to be answered."""

    def on_validate_end(self) -> None:
        """They were answered, or that failed."""

    def on_train_begin(self) -> None:
        """The first step is about to begin."""

    def on_step_begin(self, step: StepState) -> None:
        """A step begins."""

    def on_sample_begin(self, step: StepState) -> None:
        """The step is about to wait for its responses."""

    @abstractmethod
    def on_sample_end(self, step: StepState) -> None:
        """The responses are there, or waiting failed (``step.error``)."""

    @abstractmethod
    def on_step_end(self, step: StepState) -> None:
        """The step was trained, or failed (``step.error``)."""

    def on_train_end(self) -> None:
        """Nothing more is trained."""

    # The loop.

    def fit(self) -> None:
        """Train to the last step.

        Raises:
            PreemptedError: a signal asked for a stop; a checkpoint of the step that ended is on disk.
        """
        status, message = "failed", ""
        try:
            tell_standing(self.parts, self.step_number, self.measured_figures())
            self._hook("on_init_end", self.on_init_end)
            if self.parts.recorder is not None and self.step_number not in self.parts.checkpoints.steps():
                self.save_checkpoint()  # what the first recorded step is trained again from
            self.parts.rollouter.resubmit()
            if self.parts.config.run.validate_before and self.step_number == 0:
                self.validate()
            self._bracket("on_train_begin", self.on_train_begin, self._steps, "on_train_end", self.on_train_end)
            status = "done"
        except PreemptedError:
            status = "preempted"
            raise
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException as error:
            message = str(error) or type(error).__name__
            raise
        finally:
            self.parts.events.emit(RunEnded(step=self.step_number, status=status, error=message))  # type: ignore[arg-type]
            self.parts.events.flush()
            if self.parts.recorder is not None:
                self.parts.recorder.end()

    def validate(self) -> None:
        """Answer the held-out prompts greedily and file the result."""
        if not self.parts.held_out:
            return

        def evaluate() -> None:
            self.file_validation(self.step_number, self.parts.rollouter.evaluate(self.parts.held_out))

        self._bracket("on_validate_begin", self.on_validate_begin, evaluate, "on_validate_end", self.on_validate_end)

    def update_weights(self) -> None:
        """Bring the replicas to the version of the last trained step."""
        self.count_sync(self.parts.rollouts.sync_weights(self.step_number))
        self.parts.rollouter.update_param_version(self.step_number)

    def count_sync(self, report: SyncReport) -> None:
        """Have a sync among the step's figures."""
        self._syncs.add(report)

    def file_validation(self, step: int, found: Evaluation) -> None:
        """Keep and tell what the weights after ``step`` answered."""
        self.evaluations.append((step, found))
        self.parts.events.emit(
            Validated(step=step, accuracy=found.accuracy, by_label=found.by_label, prompts=found.prompts)
        )

    def measured_figures(self) -> dict[str, float]:
        """Return what earlier steps taught a mode that decides by measurements."""
        return {}

    def validates_beside(self) -> bool:
        """Whether the validation that is due after this step is under way already, beside the training."""
        return False

    def _steps(self) -> None:
        run = self.parts.config.run
        while self.step_number < self.parts.total_steps and self._has_prompts():
            self._step()
            if run.checkpoint_every and self.step_number % run.checkpoint_every == 0:
                self.save_checkpoint()
            if run.validate_every and self.step_number % run.validate_every == 0 and not self.validates_beside():
                self.validate()
            if self.parts.stop.requested and self.step_number < self.parts.total_steps:
                self._stop(self.parts.stop.requested)
        # A run that was killed after its last step still owes these.
        if self._saved_step != self.step_number:
            self.save_checkpoint()
        self.finish_validations()
        if not any(step == self.step_number for step, _ in self.evaluations):
            self.validate()

    def _has_prompts(self) -> bool:
        """Whether there is something to train; a run that replaces prompts may reach the end of its data early."""
        with self.parts.buffer.changed:
            if not self._data_ended and (self.parts.cursor.remaining != 0 or len(self.parts.buffer)):
                return True
        done = f"step {self.step_number} of {self.parts.total_steps}"
        self.parts.events.emit(Noted(message=f"the data ended after {done}: prompts were replaced"))
        return False

    def _step(self) -> None:
        begin, recorder = time.perf_counter(), self.parts.recorder
        step = StepState(number=self.step_number + 1)

        def stages() -> None:
            self._stage(STAGES[0], step)
            rounds: list[dict[str, float]] = []
            for step.round in range(self.parts.config.trainer.parameter_sync_step or 1):
                step.metrics = {}
                if recorder is not None:
                    recorder.begin_round(self.parts.algorithm.kl.value)
                self._stage(STAGES[1], step)
                if not step.groups:
                    break  # the data has ended
                for name in STAGES[2:]:
                    self._stage(name, step)
                rounds.append(step.metrics)
                if recorder is not None:
                    recorder.end_round(step, self.parts.algorithm.kl.value)
            self._data_ended = not rounds
            if rounds:
                step.metrics = metrics_of_step(rounds)
                self.step_number = step.number

        begins, ends = (lambda: self.on_step_begin(step)), (lambda: self.on_step_end(step))
        self._recording_failure(step, lambda: self._bracket("on_step_begin", begins, stages, "on_step_end", ends, step))
        if self._data_ended:
            return
        step.metrics |= step_figures(step, time.perf_counter() - begin) | self._syncs.take() | self._of_rollouts()
        if step.metrics["skipped_updates"]:
            self.parts.events.emit(Noted(message=f"step {step.number}: gradient not finite, update skipped"))
        self._skipped = self._skipped + 1 if step.metrics["skipped_updates"] else 0
        self.parts.events.emit(StepEnded(step=step.number, version=step.number, metrics=figures_out(step.metrics)))
        if recorder is not None:
            recorder.end_step(step.number, step.metrics, self.parts.model, self.parts.critic)
        self.parts.events.flush()
        if self._skipped >= MOST_SKIPPED:
            raise RlctlError(
                f"the gradients of {self._skipped} steps in a row were not finite: the model has diverged",
                fix="lower trainer.optimizer.lr and continue from an earlier checkpoint, or start again",
            )

    def _recording_failure(self, step: StepState, act: Callable[[], None]) -> None:
        try:
            act()
        except PreemptedError:
            raise
        except Exception as error:
            if self.parts.recorder is not None:
                self.parts.recorder.fail_step(step, error, self.parts.algorithm.kl.value)
            raise

    def _of_rollouts(self) -> dict[str, float]:
        rollouts = self.parts.rollouts
        return rollouts.take_figures() if isinstance(rollouts, MeasuredRollouts) else {}

    def _stage(self, name: str, step: StepState) -> None:
        act = self._stages.table.get(name)
        if act is None:
            return
        error, step.stage = "", name
        try:
            step.time(name, lambda: act(step))
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            self.parts.events.emit(Stage(name=name, step=step.number, seconds=step.seconds[name], error=error))

    def _sampling(self, step: StepState, sample: Callable[[], None]) -> None:
        self._bracket(
            "on_sample_begin",
            lambda: self.on_sample_begin(step),
            sample,
            "on_sample_end",
            lambda: self.on_sample_end(step),
            step,
        )

    def _bracket(
        self,
        begin_name: str,
        begin: Callable[[], None],
        body: Callable[[], None],
        end_name: str,
        end: Callable[[], None],
        step: StepState | None = None,
    ) -> None:
        """Run begin, body and end; the end runs whatever happened, and the first error is the one raised."""
        try:
            self._hook(begin_name, begin)
            body()
        except BaseException as error:
            if step is not None:
                step.error = error
            try:
                self._hook(end_name, end)
            except Exception as second:  # noqa: BLE001 - whatever it was, the first error is the one to show
                error.add_note(f"{end_name} failed too: {second}")
            raise
        self._hook(end_name, end)

    def _hook(self, name: str, act: Callable[[], None]) -> None:
        error = ""
        try:
            act()
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            self.parts.events.emit(Hook(name=name, step=self.step_number, error=error))

    def _stop(self, name: str) -> None:
        self.parts.events.emit(Signalled(name=name, step=self.step_number))
        if self._saved_step != self.step_number:
            self.save_checkpoint()
        raise PreemptedError(
            f"stopped by {name} after step {self.step_number} of {self.parts.total_steps}; a checkpoint is saved",
            fix="continue with --resume auto",
        )
