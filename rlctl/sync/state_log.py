"""The states a sync goes through: in their order, timed, and told to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rlctl.sync.report import SyncEvent
from rlctl.sync.states import Commit, State, may_follow


class StateLog:
    """One sync's.

    Args:
        version: that is brought.
        commit: the policy, which sets the order.
        errors: returns what has gone wrong so far.
        on_event: the listener. What it raises is kept in ``listener_error``: it must not leave replicas paused.

    Attributes:
        phases: state -> seconds.
    """

    def __init__(
        self, version: int, commit: Commit, errors: Callable[[], list[str]], on_event: Callable[[SyncEvent], None]
    ) -> None:
        self.phases: dict[str, float] = {}
        self.listener_error: Exception | None = None
        self._version = version
        self._commit: Commit = commit
        self._errors = errors
        self._on_event = on_event
        self._last: State | None = None

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Be in ``state``, which may follow the last one."""
        assert may_follow(self._commit, self._last, state)
        begin, known = monotonic(), self._errors()
        try:
            yield
        finally:
            seconds = monotonic() - begin
            self._last = state
            self.phases[state] = self.phases.get(state, 0.0) + seconds
            news = [e for e in self._errors() if e not in known]
            self.tell("state", state=state, seconds=seconds, detail="; ".join(news))

    def tell(self, kind: str, *, state: str = "", seconds: float = 0.0, replica: str = "", detail: str = "") -> None:
        """Tell the listener."""
        try:
            self._on_event(SyncEvent(kind, self._version, state, seconds, replica, detail))
        except Exception as error:  # noqa: BLE001 - raised when the sync has ended
            self.listener_error = self.listener_error or error
