"""Answers that whoever waits for them fetches: to wake a thread for each takes longer than most commands."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from rlctl.process import Channel
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline


class Owed(Future[Any]):
    """An answer to come over a channel. A thread fetches it when it is waited for otherwise than by ``result``,
    ``exception`` or ``fetched``.

    Args:
        channel: that it comes over.
        patience: until when it is waited for.
        fetch: waits for it until then, and returns it.
        what: names the thread.
    """

    def __init__(self, channel: Channel, patience: Deadline, fetch: Callable[[], Any], what: str) -> None:
        super().__init__()
        self.channel = channel
        self.patience = patience
        self._fetch = fetch
        self._what = what
        self._free = threading.Lock()  # until somebody fetches it

    @property
    def claimed(self) -> bool:
        """Whether somebody fetches it, or has."""
        return self._free.locked()

    def fetch(self) -> None:
        """Fetch it in this thread, if nobody else does."""
        mine = False
        try:  # Ctrl-C may come at any line
            mine = self._free.acquire(blocking=False)
            if mine:
                self._settle()
        except BaseException as error:
            if mine and not self.done():
                self.set_exception(error)
            raise

    def fetch_beside(self) -> None:
        """Have a thread fetch it, if nobody does: from now on it is claimed, whenever the thread gets to it."""
        if self._free.acquire(blocking=False):
            call(self._settle, self._what)

    def _settle(self) -> None:
        try:
            found = self._fetch()
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):  # Ctrl-C is this thread's own
                raise
        else:
            self.set_result(found)

    def result(self, timeout: float | None = None) -> Any:
        """See Future."""
        self._wait_for(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See Future."""
        self._wait_for(timeout)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """See Future."""
        super().add_done_callback(fn)
        self.fetch_beside()

    def _wait_for(self, timeout: float | None) -> None:
        if timeout is None:
            self.fetch()
        else:
            self.fetch_beside()


def fetched(futures: Collection[Future[Any]], deadline: Deadline) -> list[Owed]:
    """Return those answers that came first, fetched in this thread; none when others are among them, when they take
    until the deadline, or when a process ended: then threads have begun to fetch all."""
    owed = [future for future in futures if isinstance(future, Owed)]
    if len(owed) == len(futures) and not any(one.claimed for one in owed):
        poll = select.poll()
        found = {one.channel.fileno(): one for one in owed}
        for number in found:
            poll.register(number, select.POLLIN)
        first = min([deadline, *(one.patience for one in owed)], key=lambda limit: limit.remaining)
        events = poll.poll(0 if any(one.channel.pending for one in owed) else first.milliseconds)
        if events and all(event == select.POLLIN for _, event in events):
            ready = [found[number] for number, _ in events]
            for one in ready:
                one.fetch()
            return ready
    for one in owed:
        one.fetch_beside()
    return []
