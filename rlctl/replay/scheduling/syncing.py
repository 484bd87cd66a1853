"""Weight syncs told again: the order of their edges, which version each brings, and what the queue stamps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlctl.experience.event_base import Event
from rlctl.experience.events import SyncEnded, SyncPhase
from rlctl.experience.message_queue import MessageQueue
from rlctl.experience.schedule_events import LoopChanged, QueueChanged, ScheduleBegan
from rlctl.replay.scheduling.expecting import require
from rlctl.schema import Config
from rlctl.sync.colocated import PHASES
from rlctl.sync.states import State, may_follow
from rlctl.trainers.sync_order import sync_edges, validates_beside

_MARKS = {"pause": "paused", "version": "queue", "transfer": "synced", "update": "told"}
"""What an edge must have brought about when it is over."""

_FIRST = (PHASES[0], State.ANNOUNCE, "reshard")
_FAILED = ("look", "resume", "stop")


class Syncing:
    """The rules of ``ParameterSynchronizer``, of the transaction's states and of ``MessageQueue``, driven by one
    attempt's events.

    Args:
        config: of the attempt.
        began: where it stood.
        beside: whether the mode syncs through a ``ParameterSynchronizer``.
    """

    def __init__(self, config: Config, began: ScheduleBegan, *, beside: bool) -> None:
        self._config, self._began, self._beside = config, began, beside
        self.due = began.step
        self._version = self._brought = -1  # that the loop brings, and that replicas serve
        self._todo: list[str] = []
        self._marks: set[str] = set()
        self._failed = self._lent = self._validates = False
        self._resumed = True
        self._state: tuple[int, str] = (-1, "")
        self._told: list[QueueChanged] = []
        self._queue: MessageQueue[None] = MessageQueue(tell=self._queue_told)
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            SyncPhase: self._phase,
            SyncEnded: self._ended,
            LoopChanged: self._loop,
            QueueChanged: self._queue_changed,
        }

    def take(self, event: Event) -> None:
        """Take an event. Raises DisagreementError."""
        self.handlers[type(event)](event)

    def _phase(self, event: SyncPhase) -> None:
        name = event.phase
        if not event.loop:
            self._inner(event)
            return
        if name == "pause" and not self._failed:
            self._begin(event)
        require(event.version == self._version, event, "sync", f"version {self._version} is brought")
        if self._failed:
            require(name in (*_FAILED, "take back", "save"), event, "sync", "a sync failed before it")
        elif name == "take back":
            require(self._lent and self._resumed, event, "sync", "no replicas are lent, or their validation goes on")
            self._lent = False
        elif name != "save":
            self._edge(event)

    def _edge(self, event: SyncPhase) -> None:
        name = event.phase
        require(bool(self._todo) and self._todo[0] == name, event, "sync", f"{self._todo[:1] or 'no edge'} is next")
        self._todo.pop(0)
        if event.error:
            self._failed = True
            return
        mark = _MARKS.get(name)
        require(mark is None or mark in self._marks, event, "sync", f"it has not done its work ({mark})")
        self._lent = self._lent or name == "lend"

    def _begin(self, event: SyncPhase) -> None:
        require(self._beside, event, "sync", "this mode syncs while nothing generates")
        require(not self._todo and not self._lent, event, "sync", "the sync before it is not over")
        self._version = self.due
        began = self._began
        self._validates = validates_beside(self._config, began.held_out, step=self.due, steps=began.steps)
        self._todo = list(sync_edges(lend=self._validates and began.hybrids > 0))

    def _loop(self, event: LoopChanged) -> None:
        if event.change == "paused":
            require(self._beside and self._resumed, event, "sync", "it is paused, or never is")
            self._resumed, self._marks = False, {"paused"}
        elif event.change == "resumed":
            require(self._failed or (not self._todo and "told" in self._marks), event, "sync", "the sync is under way")
            self._resumed = True
        else:
            require(event.version == self.due, event, "sync", f"version {self.due} comes next")
            require("synced" in self._marks, event, "sync", "no replica was brought to it")
            validates = self._beside and self._validates
            require(event.validates == validates, event, "sync", "the validation is told otherwise")
            self._marks.discard("synced")
            self._marks.add("told")

    def _ended(self, event: SyncEnded) -> None:
        # A replica that was started again, or is lent, is brought to the version that generates at any time.
        syncs = not self._beside or self._todo[:1] == ["transfer"]
        versions = {self._brought, self.due} if syncs else {self._brought}
        require(event.version in versions, event, "sync", f"version {max(versions)} is brought, or generates")
        if syncs and event.version == self.due and event.status in ("committed", "fenced"):
            self._brought = self.due
            self._marks.add("synced")

    def _inner(self, event: SyncPhase) -> None:
        """A state of the transfer itself. One that reshards in place has no order but its version's."""
        version, last = self._state
        name = event.phase
        begins = name in _FIRST
        versions = {self._brought, self.due} if begins else {version}
        require(event.version in versions, event, "sync", f"version {max(versions)} is under way")
        self._state = (event.version, name)
        if begins or self._config.placement.layout == "hybrid":
            return
        if name in PHASES:
            follows = last in PHASES and PHASES.index(name) == PHASES.index(last) + 1
        else:
            known = {name, last} <= set(State)
            orders = {self._config.sync.commit, "inplace"}  # a replica that catches up has no version to keep
            follows = known and any(may_follow(o, State(last), State(name)) for o in orders)
        require(follows, event, "sync", f"it does not follow {last or 'nothing'}")

    def _queue_changed(self, event: QueueChanged) -> None:
        self._told.clear()
        if event.change == "version":
            due = self._beside and event.version == self.due and self._todo[:1] == ["version"]
            require(due, event, "queue", f"version {self.due} comes with the next sync")
            self._queue.update_param_version(event.version)
            self._marks.add("queue")
        elif event.change == "put":
            self._queue.put(None, 0.0)
        else:
            require(len(self._queue) == event.count, event, "queue", f"{len(self._queue)} messages are there")
            self._queue.drain()
        version = self._told[-1].version if self._told else None
        require(event.version == version, event, "queue", f"version {version} is stamped here")

    def _queue_told(self, event: Event) -> None:
        assert isinstance(event, QueueChanged)
        self._told.append(event)
