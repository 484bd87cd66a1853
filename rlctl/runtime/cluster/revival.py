"""Replicas that died are started again, in the background and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from rlctl.errors import RlctlError
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline

Life = Literal["died", "restarted", "left"]


class Mortal(Protocol):
    """A replica that can be started again."""

    @property
    def replica(self) -> str:
        """Its name."""

    def restart(self, deadline: Deadline) -> None:
        """Begin anew after a death, without weights."""


class Revival:
    """Starts replicas again.

    Args:
        replicas: all that there are.
        tries: starts of one replica in a row that may fail, or end in a death before it served, until it is given up.
        timeout: seconds of one start.
        tell: told of each death, restart and giving up, with why, from threads of its own.
    """

    def __init__(
        self,
        replicas: Iterable[Mortal],
        *,
        tries: int,
        timeout: float,
        tell: Callable[[str, Life, str], None],
    ) -> None:
        self._replicas = {replica.replica: replica for replica in replicas}
        self._tries, self._timeout, self._tell = tries, timeout, tell
        self._changed = threading.Condition()
        self._losses: set[str] = set()  # nobody has taken them
        self._given_up: set[str] = set()
        self._failed: dict[str, int] = {}
        self._closed = False

    def lost(self, name: str, reason: str) -> None:
        """A replica died: start it again, in the background."""
        with self._changed:
            if self._closed:
                return
            self._losses.add(name)
        call(lambda: self._revive(name, reason), f"restart replica {name}")

    def served(self, names: Iterable[str]) -> None:
        """These serve: what went wrong with them before is forgotten."""
        with self._changed:
            for name in names:
                self._failed.pop(name, None)

    def take_losses(self) -> set[str]:
        """Return which replicas died since the last call."""
        with self._changed:
            losses, self._losses = self._losses, set()
            return losses

    def wait(self, reached: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until ``reached`` holds, every replica has been given up, or the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._given_up >= self._replicas.keys(), deadline.remaining)

    def close(self) -> None:
        """Start nothing any more."""
        with self._changed:
            self._closed = True

    def _revive(self, name: str, reason: str) -> None:
        self._tell(name, "died", reason)
        failure = self._restart(name, reason)
        with self._changed:
            if failure:
                self._given_up.add(name)
            self._changed.notify_all()
        if self._closed:
            return
        if failure:
            self._tell(name, "left", f"given up after {self._tries} starts: {failure}")
        else:
            self._tell(name, "restarted", "")

    def _restart(self, name: str, reason: str) -> str:
        """Start a replica; return why it is given up, empty when it is there."""
        while not self._closed:
            with self._changed:
                tried = self._failed[name] = self._failed.get(name, 0) + 1
            if tried > self._tries:
                return reason
            try:
                self._replicas[name].restart(Deadline(self._timeout))
                return ""
            except RlctlError as error:
                reason = error.message
        return reason
