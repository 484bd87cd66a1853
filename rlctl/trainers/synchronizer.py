"""New weights for rollouts beside the trainer: pause, version, transfer, update, resume, each with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from rlctl.errors import RlctlError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import SyncPhase
from rlctl.experience.message_queue import MessageQueue
from rlctl.rollout.rollouter import Evaluation
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from rlctl.sync.report import SyncReport
from rlctl.tasks.base import Sample
from rlctl.trainers.parts import RolloutSide
from rlctl.trainers.sync_order import Edge, end_after_failure, sync_edges

T = TypeVar("T")


class RolloutLoop(Protocol):
    """What a synchronizer needs of the rollouter."""

    def pause(self) -> None:
        """Hand no more requests over."""

    def resume(self) -> None:
        """Hand requests over again; returns at once."""

    def stop(self) -> None:
        """End for good."""

    def update_param_version(
        self, version: int, *, validate: Sequence[Sample] | None = None
    ) -> Future[Evaluation | None]:
        """Take note of the version that generates, and answer held-out prompts; returns at once."""

    def state(self) -> Mapping[str, Any]:
        """Return what must survive, with what is under way."""


class Validation(NamedTuple):
    """The result of a validation: of the weights after how many steps."""

    global_steps: int
    found: Evaluation


class ParameterSynchronizer:
    """Brings versions to the rollout side while its loop runs in the background.

    A sync pauses the loop (what runs is cancelled or drained by the transfer, as ``trainer.interruption`` says, and the
    KV cache is cleared), tells the queue the version, transfers, has the loop take note of the version without waiting
    for it, which may validate while training goes on, and resumes the loop when that is done. Every wait ends by its
    deadline. After a failure the loop is either resumed, when a replica still serves, or stopped: never paused.

    Args:
        rollouts: the replicas.
        rollouter: the loop that feeds them.
        queue: carries the version, and brings validations back.
        events: where the edges are told, as ``SyncPhase``.
        held_out: prompts of a validation.
        timeout: seconds for each edge. The transfer has a deadline of its own and gets a little longer.
        validate_timeout: seconds for a validation.
    """

    def __init__(
        self,
        rollouts: RolloutSide,
        rollouter: RolloutLoop,
        queue: MessageQueue[Validation],
        events: EventLog,
        *,
        held_out: Sequence[Sample] = (),
        timeout: float = 300.0,
        validate_timeout: float = 3600.0,
    ) -> None:
        self._rollouts = rollouts
        self._rollouter = rollouter
        self._events = events
        self._held_out = held_out
        self._timeout = timeout
        self._validate_timeout = validate_timeout
        self._last: _Chain | None = None
        self.queue = queue

    def sync_weights(
        self, version: int, validate: bool = False, global_steps: int = 0, use_trainer_do_validate: bool = False
    ) -> SyncReport:
        """Bring the rollout side to ``version``.

        Args:
            version: of the trainer's weights now.
            validate: answer the held-out prompts with them; the result comes through the queue.
            global_steps: steps trained so far, to file the validation under.
            use_trainer_do_validate: lend the trainer's devices to the validation; this returns when it is over then.

        Raises:
            SyncError: no replica serves ``version``.
            RlctlError: an edge failed or did not end in time, by name; of the sync before this one, too.
        """
        self.wait_last_valid()
        lend = validate and use_trainer_do_validate and self._rollouts.hybrids > 0
        prompts = self._held_out if validate else None
        acts: dict[Edge, Callable[[], Any]] = {
            "pause": self._rollouter.pause,
            "version": lambda: self.queue.update_param_version(version),
            "transfer": lambda: self._rollouts.sync_weights(version),
            "lend": lambda: self._rollouts.to_rollout(version),
            "update": lambda: self._rollouter.update_param_version(version, validate=prompts),
        }
        more: dict[Edge, dict[str, Any]] = {
            "pause": {"undo": self._rollouter.resume},  # one that comes too late must not stay
            "transfer": {"grace": 5.0},
        }
        try:
            done = {edge: self._edge(edge, version, acts[edge], **more.get(edge, {})) for edge in sync_edges(lend=lend)}
        except BaseException as error:
            self._after_failure(version, error)
            raise
        self._last = _Chain(done["update"], self._rollouter.resume, self._validate_timeout, self._file(global_steps))
        if lend:
            try:
                self.wait_last_valid()
            finally:
                self._edge("take back", version, self._rollouts.to_trainer)
        report: SyncReport = done["transfer"]
        return report

    def wait_last_valid(self) -> None:
        """Wait until the last sync is over in all its parts: the version's update, its validation, the resume. Returns
        at once when it is. Raises what went wrong in them, once."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def rollouter_save_checkpoint(self) -> Mapping[str, Any]:
        """Return the loop's state, with what is under way, once the last sync is over. Raises RlctlError."""
        self.wait_last_valid()
        return self._edge("save", self.queue.param_version, self._rollouter.state)

    def _file(self, global_steps: int) -> Callable[[Evaluation | None], None]:
        def file(found: Evaluation | None) -> None:
            if found is not None:
                self.queue.put(Validation(global_steps, found), timeout=0.0)

        return file

    def _edge(
        self,
        name: str,
        version: int,
        act: Callable[[], T],
        *,
        grace: float = 0.0,
        undo: Callable[[], None] | None = None,
    ) -> T:
        """Do something in a thread of its own, so that it ends here by its deadline whatever it does; ``undo`` follows
        on what is done after that."""
        deadline = Deadline(self._timeout + grace)
        error = ""
        future = call(act, name)
        try:
            return _result(future, deadline, f"weight sync to version {version}: {name}")
        except DeadlineError as caught:
            error = caught.message
            if undo is not None:
                future.add_done_callback(lambda _: undo())
            raise
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            seconds = deadline.elapsed
            self._events.emit(SyncPhase(version=version, phase=name, seconds=seconds, error=error, loop=True))

    def _after_failure(self, version: int, error: BaseException) -> None:
        """End resumed where something serves, else dead."""
        serves = False
        try:
            serves = any(v is not None for v in self._edge("look", version, self._rollouts.versions).values())
        except RlctlError as second:
            error.add_note(f"which replicas serve is not known: {second}")
        name = end_after_failure(serves=serves)
        try:
            self._edge(name, version, self._rollouter.resume if name == "resume" else self._rollouter.stop)
        except Exception as second:  # noqa: BLE001 - whatever it was, the first error is the one to show
            error.add_note(f"{name} failed too: {second}")


class _Chain:
    """An update, then what follows on it: the resume, whatever became of the update, also when that never ends."""

    def __init__(
        self,
        update: Future[Evaluation | None],
        resume: Callable[[], None],
        timeout: float,
        file: Callable[[Evaluation | None], None],
    ) -> None:
        self._resume = resume
        self._file = file
        self._deadline = Deadline(timeout)
        self._once = threading.Lock()
        self._over: Future[None] = Future()
        self._timer = threading.Timer(timeout, self._late)
        self._timer.daemon = True
        if not update.done():
            self._timer.start()
        update.add_done_callback(self._updated)

    def wait(self) -> None:
        _result(self._over, Deadline(self._deadline.remaining + 5.0), "the end of the last weight sync")

    def _updated(self, update: Future[Evaluation | None]) -> None:
        if self._once.acquire(blocking=False):
            self._timer.cancel()
            self._end(update.exception(), lambda: self._file(update.result()))

    def _late(self) -> None:
        if self._once.acquire(blocking=False):
            self._end(self._deadline.error("the rollouter's version update, with its validation"), lambda: None)

    def _end(self, error: BaseException | None, file: Callable[[], None]) -> None:
        try:
            self._resume()
            if error is None:
                file()
        except BaseException as second:  # noqa: BLE001 - it is handed to whoever waits
            error = error or second
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def _result(future: Future[T], deadline: Deadline, what: str) -> T:
    try:
        return future.result(deadline.remaining)
    except TimeoutError as error:
        if future.done():
            raise  # the call's own
        raise deadline.error(what) from error
