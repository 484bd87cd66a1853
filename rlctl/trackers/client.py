"""One tracker as the run sees it: messages to a child process, none of which the run waits for."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from rlctl.process import Child, ChildDied, start
from rlctl.trackers.base import RunInfo
from rlctl.trackers.worker import Close, Log, Open, Reply, serve

_UNDERWAY = 16
"""So many unanswered messages fit the socket's buffer many times over: sending one more never waits."""
_SEND_SECONDS = 1.0
_GLANCE_SECONDS = 0.0005
_MOST_WAITING = 10_000


class TrackerError(Exception):
    """The tracker is of no use any more; the text says why. Its process is gone."""


class TrackerClient:
    """A tracker in its process.

    Args:
        name: as the user wrote it.
        target: ``module:Class``.
        run: what it follows.
        patience: seconds that one message may take.
        output: file for what the tracker prints.

    Raises:
        TrackerError: the process cannot be started.
    """

    def __init__(self, name: str, target: str, run: RunInfo, *, patience: float, output: Path) -> None:
        self.name = name
        self._patience = patience
        self._waiting: deque[Open | Log | Close] = deque([Open(target, run)])
        self._sent: deque[float] = deque()
        self._notices: list[str] = []
        try:
            self._child: Child = start(f"{serve.__module__}:{serve.__name__}", name=f"tracker-{name}", output=output)
        except (ChildDied, TimeoutError, OSError) as error:
            raise TrackerError(f"its process did not start: {error or type(error).__name__}") from error
        self._pump()

    def log(self, step: int, figures: dict[str, float]) -> list[str]:
        """Hand over the figures of one step without waiting and return what there is to tell.

        Raises:
            TrackerError: it failed, died, or has been silent for longer than its patience.
        """
        if len(self._waiting) >= _MOST_WAITING:
            self._give_up(f"it is {_MOST_WAITING} steps behind")
        self._waiting.append(Log(step, figures))
        return self.poll()

    def close(self, status: str) -> list[str]:
        """Ask the tracker to file what is left and to close, without waiting; as ``log`` otherwise."""
        self._waiting.append(Close(status))
        return self.poll()

    def poll(self) -> list[str]:
        """Move on without waiting and return what there is to tell. Raises TrackerError as ``log`` does."""
        self._pump()
        return self._take_notices()

    @property
    def idle(self) -> bool:
        """Whether all that it was told has been answered."""
        return not self._waiting and not self._sent

    def end(self) -> None:
        """End the process, which has nothing left to do."""
        self._child.close()

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()

    def _pump(self) -> None:
        """Take the answers that are there, then send what may be sent."""
        while self._sent and (reply := self._answer()) is not None:
            self._sent.popleft()
            if self._sent:
                self._sent[0] = time.monotonic()  # its turn begins now
            if reply.fault:
                self._give_up(reply.fault)
            if reply.notice:
                self._notices.append(reply.notice)
        if self._sent and time.monotonic() - self._sent[0] > self._patience:
            self._give_up(f"no answer within {self._patience:g} s")
        while self._waiting and len(self._sent) < _UNDERWAY:
            try:
                self._child.channel.send(self._waiting[0], _SEND_SECONDS)
            except OSError as error:  # TimeoutError is one
                self._give_up(self._child.ending() if not self._child.alive() else f"it takes no messages: {error}")
            self._waiting.popleft()
            self._sent.append(time.monotonic())

    def _answer(self) -> Reply | None:
        try:
            return self._child.channel.receive(_GLANCE_SECONDS, Reply)
        except TimeoutError:
            return None
        except (EOFError, OSError):
            self._give_up(f"its process died: {self._child.ending()}")

    def _give_up(self, why: str) -> NoReturn:
        self._child.kill()
        raise TrackerError(why)

    def _take_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices
