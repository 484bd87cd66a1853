"""One turn of the rollout side: prompts are admitted, requests handed over, the engine steps, what ended is filed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rlctl.errors import RlctlError
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Dispatched
from rlctl.experience.groups import PromptGroup
from rlctl.experience.schedule_events import Admitted
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, RolloutEngine, SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.rollout.ended import ended_before
from rlctl.rollout.filing import Filing
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.cursor import PromptCursor

WAIT_SECONDS = 0.1
"""The longest that a turn waits for an output, while other requests may come to be handed over."""

INTERRUPT_SECONDS = 60.0
"""The longest that requests which were aborted take to end."""


class Pool(Protocol):
    """Replicas that decode by themselves; calls may come from several threads."""

    @property
    def num_running(self) -> int:
        """Requests submitted whose output ``step`` has not returned."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests."""

    def step(self, timeout: float) -> list[Output]:
        """Return what has ended; wait up to ``timeout`` seconds for the first."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the outputs of ``requests``, in their order."""

    def abort(self) -> None:
        """End all requests, keeping the tokens made so far; their outputs come out of ``step``."""

    def describe(self) -> str:
        """Say which replica has how many requests, and which serve none and why."""


Decodes = RolloutEngine | Pool
"""What the rollout side feeds. An engine of this process takes one call at a time."""


class Feeder:
    """Knows which requests run and which wait to be handed over. One thread turns; others may ask.

    Args:
        engine: where responses are made.
        task, conversations, buffer, events: see Rollouter.
        encode: a prompt's token ids.
        params: sampling of training rollouts.
        samples: responses of one prompt.
        seed: the run's seed.
        cursor: where prompts come from once they are admitted here; None: they only come by ``submit``.
        partial: see ``Filing``.

    Attributes:
        version: of the weights that generate; -1 before there are any.
        paused: why nothing is handed over, or "".
        interrupted_by: what is told to have interrupted requests that the engine returns as interrupted.
        admits: whether prompts are taken from the cursor.
        judges: whether a turn has outputs judged; else another thread calls ``filing.judge``.
    """

    def __init__(
        self,
        engine: Decodes,
        task: Task,
        conversations: Conversations,
        buffer: GroupBuffer,
        events: EventLog,
        encode: Callable[[Sample], list[int]],
        *,
        params: SamplingParams,
        samples: int,
        seed: int,
        cursor: PromptCursor | None,
        partial: bool,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._buffer = buffer
        self._events = events
        self._encode = encode
        self._params = params
        self._samples = samples
        self._seed = seed
        self._cursor = cursor
        self.filing = Filing(
            task, conversations, buffer, events, params,
            partial=partial, again=self._queue, version=lambda: self.version,
        )  # fmt: skip
        self.version = -1
        self.paused = ""
        self.interrupted_by = "sync"
        self.admits = False
        self.judges = True
        self._queued: list[Request] = []
        self._running: set[RequestKey] = set()

    def submit(self, prompts: Sequence[tuple[int, Sample]], version: int) -> None:
        """Admit prompts to the buffer and queue their requests."""
        with self._buffer.changed:
            for ordinal, sample in prompts:
                group = PromptGroup(
                    ordinal, sample.index, sample.group, self._encode(sample), self._samples, version, task=sample.task
                )
                self._buffer.submit(group)
                self._events.emit(
                    Dispatched(
                        ordinal=ordinal, row=sample.index, samples=self._samples, version=version, task=sample.task
                    )
                )
                for index in range(group.size):
                    self._queue(group, index)

    def resubmit(self) -> None:
        """Queue what the buffer waits for."""
        with self._buffer.changed:
            for group in self._buffer.unfinished():
                for sample in range(group.size):
                    if sample not in group.responses:
                        self._queue(group, sample)

    def turn(self) -> None:
        """Admit, hand over, step and file, each where there is something to do."""
        if not self.paused:
            self._admit()
            self.hand_over()
        if self._running:
            begin = time.perf_counter()
            outputs = self._step()
            self.filing.stats.seconds += time.perf_counter() - begin
            if not outputs and self._engine.num_running == 0:
                raise RlctlError(f"the engine has lost requests: {self.describe()}", fix="this is a fault in rlctl")
            self.take(outputs, self.interrupted_by)
        elif self.judges and self.filing.waiting:
            self.filing.judge(self.filing.waiting)

    def take(self, outputs: Sequence[Output], why: str) -> None:
        """File outputs; those that go on are queued again where they stopped. ``why``: what interrupted those that
        were."""
        with self._buffer.changed:
            self._running.difference_update(output.key for output in outputs)
            if outputs:
                self.filing.arrived(outputs, why)
        if self.judges and self.filing.waiting:
            self.filing.judge(self.filing.waiting)

    def interrupt(self, why: str) -> None:
        """Have the tokens of all running requests in the buffer; they are queued again, and all that are queued are so
        in the order in which a run that goes on from this buffer queues them. Nothing may turn meanwhile."""
        outputs = sorted(self._aborted(), key=lambda output: output.key)
        with self._buffer.changed:
            self._running.difference_update(output.key for output in outputs)
            self.filing.arrived(outputs, why, keep=True)
            self._queued.sort(key=lambda request: request.key)

    def _aborted(self) -> list[Output]:
        if not self._running:
            return []
        if isinstance(self._engine, RolloutEngine):
            return self._engine.abort()
        self._engine.abort()
        outputs: list[Output] = []
        deadline = time.monotonic() + INTERRUPT_SECONDS
        while len(outputs) < len(self._running):
            outputs += self._step()
            if time.monotonic() > deadline:
                raise RlctlError(
                    f"{len(self._running) - len(outputs)} requests were aborted and have not ended after "
                    f"{INTERRUPT_SECONDS:g} s: {self.describe()}"
                )
        return outputs

    def hand_over(self) -> None:
        """Give the engine the requests that wait."""
        with self._buffer.changed:
            requests, self._queued = self._queued, []
            self._running.update(request.key for request in requests)
        if requests:
            self._engine.submit(requests)

    def has_work(self) -> bool:
        """Whether a turn would do something; called holding the buffer."""
        if self._running or (self.judges and self.filing.waiting):
            return True
        return not self.paused and bool(self._queued or self._admissible())

    def describe(self) -> str:
        """Say what is where."""
        with self._buffer.changed:
            unfinished = [group.ordinal for group in self._buffer.unfinished()]
            shown = ", ".join(map(str, unfinished[:8])) + (", ..." if len(unfinished) > 8 else "")
            parts = [
                f"{len(self._buffer.finished())} groups are finished and {len(unfinished)} are not"
                + (f" (prompts {shown})" if shown else ""),
                f"{len(self._running)} requests run",
                f"{len(self._queued)} wait to be handed over",
                f"{self.filing.waiting} responses wait for their reward",
            ]
            if self.paused:
                parts.append(f"paused by {self.paused}")
            if not isinstance(self._engine, RolloutEngine):
                parts.append(self._engine.describe())
            return "; ".join(parts)

    def _step(self) -> list[Output]:
        return self._engine.step() if isinstance(self._engine, RolloutEngine) else self._engine.step(WAIT_SECONDS)

    def _admit(self) -> None:
        with self._buffer.changed:
            if not self.paused and (room := self._admissible()):
                assert self._cursor is not None
                prompts = self._cursor.take(room)
                self._events.emit(Admitted(version=self.version, room=room, taken=len(prompts), by="loop"))
                self.submit(prompts, self.version)

    def _admissible(self) -> int:
        if not self.admits or self._cursor is None or self.version < 0 or self._cursor.remaining == 0:
            return 0
        return self._buffer.room(self.version)

    def _queue(self, group: PromptGroup, sample: int) -> None:
        """Queue the request of a response that begins or goes on; one that is whole already waits for its reward."""
        so_far = group.under_way.get(sample)
        key = RequestKey(group.ordinal, sample)
        request = self._conversations.request(key, group.prompt_ids, self._params, self._seed, so_far)
        reason = ended_before(request)
        if reason is None:
            self._queued.append(request)
        else:
            self.filing.arrived([Output(request.key, list(request.prefix), reason)], "")
