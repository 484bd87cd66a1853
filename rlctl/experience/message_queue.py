"""The queue between the rollout side and the trainer: every message carries the parameter version it was put under."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from rlctl.errors import RlctlError
from rlctl.experience.event_base import Event
from rlctl.experience.schedule_events import QueueChanged
from rlctl.units import format_duration

T = TypeVar("T")


class QueueClosedError(RlctlError):
    """The queue was closed, and nothing is left in it."""


class QueueTimeoutError(RlctlError):
    """A wait for the queue ended by its deadline."""


class Message(NamedTuple, Generic[T]):
    """What was put, and the parameter version at that moment."""

    version: int
    content: T


class MessageQueue(Generic[T]):
    """First in, first out, for any number of threads. Nothing is ever dropped: whoever puts into a full queue waits.

    Args:
        capacity: most messages that wait.
        version: the parameter version to begin with.
        tell: told of versions and messages, in their order; it must not wait.
    """

    def __init__(
        self, *, capacity: int = 1024, version: int = -1, tell: Callable[[Event], None] = lambda _: None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a queue for {capacity} messages")
        self._capacity = capacity
        self._version = version
        self._tell = tell
        self._messages: deque[Message[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._messages)

    @property
    def param_version(self) -> int:
        """The version that messages are put under now."""
        with self._changed:
            return self._version

    def update_param_version(self, version: int) -> None:
        """Put later messages under ``version``. Raises ValueError when that would go back."""
        with self._changed:
            if version < self._version:
                raise ValueError(f"the parameter version is {self._version} already, and {version} is older")
            self._version = version
            self._tell(QueueChanged(change="version", version=version))
            self._changed.notify_all()

    def put(self, content: T, timeout: float) -> Message[T]:
        """Append a message and return it as it was stamped; wait up to ``timeout`` seconds for room.

        Raises:
            QueueClosedError: nobody will take it.
            QueueTimeoutError: there was no room in time.
        """
        with self._changed:
            self._wait(lambda: self._closed or len(self._messages) < self._capacity, timeout, "room in the queue")
            if self._closed:
                raise QueueClosedError("the queue is closed")
            message = Message(self._version, content)
            self._messages.append(message)
            self._tell(QueueChanged(change="put", version=self._version))
            self._changed.notify_all()
            return message

    def get(self, timeout: float) -> Message[T]:
        """Remove and return the oldest message; wait up to ``timeout`` seconds for one.

        Raises:
            QueueClosedError: there is none, and none will come.
            QueueTimeoutError: none came in time.
        """
        with self._changed:
            self._wait(lambda: bool(self._messages) or self._closed, timeout, "a message")
            if not self._messages:
                raise QueueClosedError("the queue is closed")
            message = self._messages.popleft()
            self._tell(QueueChanged(change="taken", version=self._version))
            self._changed.notify_all()
            return message

    def drain(self) -> list[Message[T]]:
        """Remove and return all that is there; never waits."""
        with self._changed:
            messages = list(self._messages)
            if messages:
                self._messages.clear()
                self._tell(QueueChanged(change="taken", version=self._version, count=len(messages)))
            self._changed.notify_all()
            return messages

    def close(self) -> None:
        """Refuse further messages; those that are there can still be taken. Harmless when repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise QueueTimeoutError(f"waiting for {what}: none within {format_duration(timeout)}")
