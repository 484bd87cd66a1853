"""Calls in threads of their own, so that one that never returns holds up nobody but itself."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds between two looks for signals.
_LOOK = 0.05


def call(function: Callable[[], T], name: str) -> Future[T]:
    """Start ``function()`` in a daemon thread in which nothing else runs, and return its future. What is called when
    that is done (``add_done_callback``) must not wait for anything."""
    future: Future[T] = Future()
    try:
        thread = _IDLE.pop()
    except IndexError:
        thread = _Caller()
        thread.start()
    thread.todo.put((function, future, f"rlctl-{name}"))
    return future


def error_of(future: Future[Any]) -> BaseException | None:
    """Return the error of a call when it is done, None when it has none. Signals are handled meanwhile: of one that
    comes just before a wait without an end, Python would hear when that ends."""
    while not wait([future], _LOOK).done:
        pass
    return future.exception()


class _Caller(threading.Thread):
    """Makes one call after the other: to wake a thread costs less than to start one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.todo: SimpleQueue[tuple[Callable[[], Any], Future[Any], str]] = SimpleQueue()

    def run(self) -> None:
        while self._call(*self.todo.get()):
            pass

    def _call(self, function: Callable[[], Any], future: Future[Any], name: str) -> bool:
        """Return whether more may come: nothing of this call is kept while this thread waits for it."""
        self.name = name
        result = error = None
        try:
            result = function()
        except BaseException as caught:  # noqa: BLE001 - it is handed to whoever waits
            error = caught
        self.name = "rlctl-idle"
        stays = len(_IDLE) < _MOST_IDLE
        if stays:  # before it is known to be done: what is called next then need not start another
            _IDLE.append(self)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, error  # the error knows this frame
        return stays


_IDLE: deque[_Caller] = deque()
_MOST_IDLE = 16
os.register_at_fork(after_in_child=_IDLE.clear)
