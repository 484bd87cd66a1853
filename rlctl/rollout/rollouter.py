"""The rollout side: submits prompts, lets the engine decode, has what ends judged, fills the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from rlctl.errors import RlctlError
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Selected
from rlctl.experience.groups import PromptGroup
from rlctl.experience.schedule_events import LoopChanged
from rlctl.rollout.base import Output, RolloutEngine, SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.rollout.evaluation import Evaluation, Evaluator
from rlctl.rollout.feeding import Decodes, Feeder
from rlctl.rollout.filing import RolloutStats
from rlctl.rollout.pump import Pump
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.chat import Chat
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.prompts import AUTO, encode_prompt
from rlctl.tasks.rewarding import Scorer

__all__ = ["Evaluation", "RolloutStats", "Rollouter"]

STOP_SECONDS = 60.0
"""The longest that ``stop`` waits for a thread's turn to end."""

REST_SECONDS = 300.0
"""The longest that a thread's turn may take, while it is waited for to save, or to evaluate."""

LOOK_SECONDS = 1.0
"""The longest that ``run`` lets pass, in the background, until it looks again although nothing has changed."""


class Rollouter:
    """Feeds one rollout engine, or a pool of them.

    In the foreground (before ``start``) the thread that calls ``run`` decodes, and prompts come from ``submit``. In the
    background a thread decodes, and takes prompts from the cursor as the buffer's admission allows; responses are
    judged in another one, so that a slow reward function keeps no device waiting. With an admission that takes groups
    in order (deterministic runs) there is one thread, and it holds wherever its goal is reached.

    Args:
        engine: where responses are made.
        task: prompts and answers.
        scorer: gives rewards, each within a deadline.
        tokenizer: a transformers tokenizer.
        buffer: where groups wait.
        events: where everything is told.
        params: sampling of training rollouts.
        samples: responses of one prompt.
        seed: the run's seed.
        max_prompt_tokens: longest prompt.
        truncate_prompts: cut the head off longer ones; else they are an error.
        chat, max_turns, conversations: see ``Conversations``, which is made of the former when not given.
        cursor: where prompts come from in the background.
        partial_rollout: whether interrupted responses go on where they were; else they begin again.
    """

    def __init__(
        self,
        engine: Decodes,
        task: Task,
        scorer: Scorer,
        tokenizer: Any,
        buffer: GroupBuffer,
        events: EventLog,
        *,
        params: SamplingParams,
        samples: int,
        seed: int,
        max_prompt_tokens: int,
        truncate_prompts: bool = False,
        chat: Chat = AUTO,
        max_turns: int | None = None,
        cursor: PromptCursor | None = None,
        partial_rollout: bool = True,
        conversations: Conversations | None = None,
    ) -> None:
        talks = conversations or Conversations(tokenizer, scorer, chat, max_turns)
        encode = partial(
            encode_prompt, tokenizer, max_prompt_tokens=max_prompt_tokens, truncate=truncate_prompts, chat=chat
        )
        self._buffer = buffer
        self._events = events
        self._cursor = cursor
        self._evaluator = Evaluator(engine, talks, encode, params, seed)
        # An engine of this process takes one call at a time; a pool takes them from several threads.
        self._one_at_a_time = isinstance(engine, RolloutEngine)
        self._feeder = Feeder(
            engine, task, talks, buffer, events, encode,
            params=params, samples=samples, seed=seed, cursor=cursor, partial=partial_rollout,
        )  # fmt: skip
        self.deterministic = buffer.admission is not None and buffer.admission.in_order
        self._goal: Callable[[], bool] | None = None
        made, filing = partial(Pump, changed=buffer.changed, on_rest=buffer.tell), self._feeder.filing
        self._pump = made(self._feeder.turn, self._goes, name="the thread that generates")
        self._judge = made(partial(filing.judge, 1), lambda: filing.waiting > 0, name="the thread that scores")

    def submit(self, prompts: Sequence[tuple[int, Sample]], version: int) -> None:
        """Admit prompts to the buffer and queue their requests. ``version``: of the weights that will generate."""
        self._feeder.submit(prompts, version)

    def resubmit(self) -> None:
        """Queue again what the buffer waits for, after a restart; finished responses are kept."""
        self._feeder.resubmit()

    def take(self, outputs: Sequence[Output], why: str = "the batch is sampled") -> None:
        """File outputs that an abort ended; those that go on are queued again where they stopped."""
        self._feeder.take(outputs, why)

    def attainable(self, count: int, version: int) -> int:
        """Return how many of ``count`` groups can still come: fewer at the end of the data. Evicts what is too old."""
        with self._buffer.changed:
            if self.may_evict():
                self._feeder.filing.expire(version)
            return self._buffer.attainable(count, 0 if self._cursor is None else self._cursor.remaining)

    @property
    def running(self) -> bool:
        """Whether it generates in the background, or rests there."""
        return self._pump.running

    def may_evict(self) -> bool:
        """Whether groups may be evicted now: in a deterministic run only while nothing is generated."""
        return not (self._pump.running and self.deterministic) or self._pump.idle

    def select(self, count: int, *, step: int, version: int) -> list[PromptGroup]:
        """Take ``count`` groups for ``step``, whose weights are of ``version``. Raises LookupError for too few."""
        with self._buffer.changed:
            groups = self._buffer.select(count, version)
            ages = [version - group.oldest_version for group in groups]
            self._events.emit(Selected(step=step, ordinals=[group.ordinal for group in groups], ages=ages))
            return groups

    def run(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Decode until ``until()`` holds, or in the background wait until it does; it is called holding the buffer.

        Raises:
            RlctlError: nothing runs any more, or ``timeout`` seconds are over, and it still does not hold.
            BaseException: what a background thread raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._buffer.changed:
                self.check()
                if until():
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RlctlError(f"the batch is not there after {timeout:g} s: {self.describe()}")
                if not self._coming():
                    raise RlctlError(
                        f"nothing is being generated, and the batch is not full: {self.describe()}",
                        fix="this is a fault in rlctl; the event log of the run shows which prompts are missing",
                    )
                if self._pump.running:
                    # Who waits may want to know also that nothing changes.
                    self._buffer.changed.wait(LOOK_SECONDS if left is None else min(left, LOOK_SECONDS))
                    continue
            self._feeder.turn()

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Answer ``samples`` greedily. Nothing enters the buffer."""
        if self._pump.running and self.deterministic:
            self.wait_held()
        with self._pump.hold(REST_SECONDS) if self._one_at_a_time else nullcontext():
            return self._evaluator.evaluate(samples)

    def take_stats(self) -> RolloutStats:
        """Return the work since the last call."""
        with self._buffer.changed:
            return self._feeder.filing.take_stats()

    def describe(self) -> str:
        """Say what is where, for whoever waits."""
        return self._feeder.describe()

    def start(self, goal: Callable[[], bool] | None = None) -> None:
        """Generate in a thread, or go on towards another goal.

        Args:
            goal: when it holds, looked at between turns and holding the buffer, nothing is generated until the next
                ``start``. None: generate for as long as the admission allows.
        """
        with self._buffer.changed:
            self._goal = goal
            self._feeder.admits, self._feeder.judges = True, self.deterministic
        self._pump.start()
        if not self.deterministic:
            self._judge.start()

    def stop(self) -> None:
        """End the threads; harmless when repeated. Raises what they raised, or RlctlError when one does not end."""
        self._evaluator.close()
        try:
            self._pump.stop(STOP_SECONDS)
        finally:
            self._judge.stop(STOP_SECONDS)
            self._feeder.admits, self._feeder.judges = False, True

    def pause(self, why: str = "sync") -> None:
        """Hand no more requests over; what ends is taken and judged. ``why`` is told of what is aborted."""
        with self._buffer.changed:
            self._feeder.paused = self._feeder.interrupted_by = why
            self._events.emit(LoopChanged(change="paused", version=self._feeder.version, why=why))
            self._buffer.changed.notify_all()

    def resume(self) -> None:
        """Hand requests over again."""
        with self._buffer.changed:
            self._feeder.paused = ""
            self._events.emit(LoopChanged(change="resumed", version=self._feeder.version))
            self._buffer.changed.notify_all()

    def held(self) -> bool:
        """Whether nothing is generated until the next call of one of these methods: the goal is reached, or there is
        nothing to do. Raises what the threads raised."""
        with self._buffer.changed:
            self.check()
            return self._pump.idle and not self._feeder.filing.waiting

    def wait_held(self, timeout: float | None = None) -> None:
        """Return when ``held()``. Raises what the threads raised, and RlctlError after ``timeout`` seconds."""
        with self._buffer.changed:
            if not self._buffer.changed.wait_for(self.held, timeout):
                raise RlctlError(f"generation is under way after {timeout:g} s: {self.describe()}")

    def check(self) -> None:
        """Raise what a thread raised, if anything."""
        self._pump.check()
        self._judge.check()

    def update_param_version(
        self, version: int, *, validate: Sequence[Sample] | None = None
    ) -> Future[Evaluation | None]:
        """Tell that ``version`` generates from now on, which may admit prompts, and return at once. The first time it
        is the number of steps trained so far.

        Args:
            version: of the weights that the engine has.
            validate: held-out prompts to answer meanwhile; the future's result is theirs.
        """
        with self._buffer.changed:
            if self._feeder.version < 0:
                self._buffer.continue_from(version)
            self._feeder.version = version
            self._events.emit(LoopChanged(change="version", version=version, validates=validate is not None))
            self._feeder.filing.expire(version)
            self._buffer.changed.notify_all()
        if validate is not None:
            return self._evaluator.beside(lambda: self.evaluate(validate))
        done: Future[Evaluation | None] = Future()
        done.set_result(None)
        return done

    def requeue(self) -> None:
        """End what runs and queue it again where it stopped: what has got lost on its way begins anew."""
        with self._pump.hold(REST_SECONDS):
            self._feeder.interrupt("stalled")

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep cursor, buffer and event log still while entered, with all tokens made so far in the buffer: running
        requests are interrupted and go on from there."""
        with self._pump.hold(REST_SECONDS), self._judge.hold(REST_SECONDS):
            self._feeder.interrupt("checkpoint")
            if not self._feeder.paused:
                self._feeder.hand_over()
            yield

    def state(self) -> dict[str, Any]:
        """Return what must survive: where the data stands, and the groups with what is under way."""
        with self.saving():
            cursor = None if self._cursor is None else self._cursor.state()
            return {"buffer": self._buffer.state(), "cursor": cursor}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; ``resubmit`` queues what is under way."""
        self._buffer.load(state["buffer"])
        if self._cursor is not None:
            self._cursor.load(state["cursor"])

    def _goes(self) -> bool:
        return not (self._goal is not None and self._goal()) and self._feeder.has_work()

    def _coming(self) -> bool:
        """Whether something comes by itself, or once others let it; called holding the buffer."""
        if self._feeder.filing.waiting:
            return True
        if self._pump.running:
            return bool(self._feeder.paused) or not self._pump.idle
        return self._feeder.has_work()
