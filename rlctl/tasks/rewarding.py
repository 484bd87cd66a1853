"""Scoring responses within a deadline each, whatever the reward function does."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from rlctl.errors import RlctlError, UsageError
from rlctl.process import Child, ChildDied, Deadline, start
from rlctl.tasks.base import Message, Sample, Score, Task
from rlctl.tasks.conversation import ConversationTask, score_of, take_step
from rlctl.tasks.outcome import Outcome, outcome_of
from rlctl.tasks.reward_worker import Call, Load, StepCall, serve
from rlctl.tasks.verifiers import STEP_TAKES, TAKES

log = logging.getLogger(__name__)
Tell = Callable[[str], object]

IMPORT_SECONDS = 120.0
PATIENCE_SECONDS = 5.0
"""After so long a wait for a user's code to be imported, it is told what is waited for."""
HOPELESS = 4
"""So many calls over their deadline before the first answer mean that there will be none."""


class Scorer(ABC):
    """Turns responses into scores."""

    @abstractmethod
    def score(self, batch: Sequence[tuple[Sample, str]]) -> list[Score]:
        """Return the scores of (sample, response text) pairs, in their order.

        Raises:
            RlctlError: the reward function never answers, or cannot be started again.
        """

    @abstractmethod
    def step(self, batch: Sequence[tuple[Sample, Sequence[Message]]]) -> list[Score]:
        """Return the scores of what the model said last in conversations, in their order; a task of one turn judges
        that as a response. Raises as ``score``, and StepError for a step that returns something else.
        """

    @abstractmethod
    def close(self) -> None:
        """End what it has started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RewardScorer(Scorer):
    """Turns responses into scores. A reward that cannot be had (late, raised, process died, not a finite number)
    counts as 0 and says why; the others of the batch are scored all the same.

    The rewards of a task that names a ``verifier`` are computed in a child process, the only one that imports it; it
    is killed and started anew when a call is late. Other tasks' ``score`` is called in this process.

    Args:
        task: what to score.
        timeout_s: deadline of one call, in seconds.
        output: file for what the user's function prints; None discards it.
        tell: called with a message when its import takes long.

    Raises:
        UsageError: the verifier cannot be imported or called.
    """

    def __init__(self, task: Task, timeout_s: float, output: Path | None = None, tell: Tell = log.warning) -> None:
        self._task = task
        self._timeout = timeout_s
        self._output = output
        self._tell = tell
        self._answered = False
        self._late = 0
        self._takes = STEP_TAKES if task.stepper else TAKES
        reference = task.stepper or task.verifier
        self._child = self._start(reference) if reference else None

    def score(self, batch: Sequence[tuple[Sample, str]]) -> list[Score]:
        return [self._score(sample, text) for sample, text in batch]

    def step(self, batch: Sequence[tuple[Sample, Sequence[Message]]]) -> list[Score]:
        if not self._task.several_turns:
            return self.score([(sample, messages[-1]["content"]) for sample, messages in batch])
        return [score_of(self._step(sample, messages), sample) for sample, messages in batch]

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def _step(self, sample: Sample, messages: Sequence[Message]) -> Outcome:
        if self._task.stepper is not None:
            return self._call(self._task.stepper, StepCall(list(messages), sample.answer))
        assert isinstance(self._task, ConversationTask)
        return take_step(partial(self._task.step, sample, messages), f"step of task {self._task.name!r}")

    def _score(self, sample: Sample, text: str) -> Score:
        verifier = self._task.verifier
        if verifier is None:
            outcome = outcome_of(lambda: {**self._task.metrics(sample, text), "reward": self._task.score(sample, text)})
        else:
            outcome = self._call(verifier, Call(sample.prompt, text, sample.answer))
        return Score(sample.index, outcome.reward, outcome.failed, outcome.metrics)

    def _call(self, reference: str, call: Call | StepCall) -> Outcome:
        if self._child is None or not self._child.alive():
            self._child = self._start(reference)
        try:
            outcome = self._child.request(call, self._timeout, Outcome)
        except TimeoutError:
            self._child.kill()
            self._late += 1
            if not self._answered and self._late >= HOPELESS:
                raise RlctlError(
                    f"the first {self._late} rewards all took longer than {self._timeout:g} s",
                    where=reference,
                    fix="mend the function, or raise task.reward_timeout",
                ) from None
            return Outcome(failed="timeout")
        except ChildDied as error:
            return Outcome(failed=f"died: {error.reason}")
        self._answered = True
        return outcome

    def _start(self, verifier: str) -> Child:
        deadline = Deadline(IMPORT_SECONDS)
        child = start(f"{serve.__module__}:{serve.__name__}", name="rewards", output=self._output)
        try:
            fault = self._fault(child, verifier, deadline)
        except (TimeoutError, ChildDied) as error:
            child.kill()
            reason = error.reason if isinstance(error, ChildDied) else f"not imported within {IMPORT_SECONDS:g} s"
            raise UsageError(f"the verifier cannot be loaded: {reason}", where=verifier) from error
        if fault:
            child.close()
            raise UsageError(f"the verifier cannot be loaded: {fault}", where=verifier)
        return child

    def _fault(self, child: Child, verifier: str, deadline: Deadline) -> str:
        try:
            return child.request(Load(verifier, self._takes), PATIENCE_SECONDS, str)
        except TimeoutError:
            self._tell(
                f"waiting for {verifier.rpartition(':')[0]} to be imported, for {deadline.remaining():.0f} s more at "
                "most"
            )
        return child.answer(deadline.remaining(), str)
