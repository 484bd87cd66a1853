"""Calls in threads of their own, so that one that never returns holds up nobody but itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call(function: Callable[[], T], name: str) -> Future[T]:
    """Start ``function()`` in a daemon thread and return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=f"rlctl-{name}", daemon=True).start()
    return future
