"""A thread that turns a loop over and over, while it may: held at the boundary of a turn, never within one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlctl.errors import RlctlError


class Pump:
    """Runs ``turn`` in a thread of its own while ``ready`` holds.

    Args:
        turn: one round; what it raises ends the thread and is raised by ``check``.
        ready: whether there is something to do; called holding ``changed``.
        changed: notified whenever ``ready`` may have become true.
        on_rest: called, holding ``changed``, when the thread comes to rest or ends; it notifies.
        name: of the thread.
    """

    def __init__(
        self,
        turn: Callable[[], None],
        ready: Callable[[], bool],
        changed: threading.Condition,
        on_rest: Callable[[], None],
        name: str,
    ) -> None:
        self._turn = turn
        self._ready = ready
        self._changed = changed
        self._on_rest = on_rest
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._resting = True
        self._holders = 0
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped; also after it has failed."""
        return self._thread is not None

    @property
    def idle(self) -> bool:
        """Whether it rests and will go on resting until something changes; it does not while it is only held."""
        with self._changed:
            return self._resting and (self._error is not None or self._stopping or not self._ready())

    def start(self) -> None:
        """Begin, or look again whether there is something to do."""
        with self._changed:
            if self._thread is None:
                self._stopping, self._error, self._resting = False, None, False
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self, timeout: float) -> None:
        """End the thread after its turn; harmless when repeated.

        Raises:
            BaseException: what the thread raised.
            RlctlError: the turn does not end within ``timeout`` seconds.
        """
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread.join(timeout)
        if thread.is_alive():
            raise RlctlError(f"{self._name} does not end: its turn has taken over {timeout:g} s")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise what the thread raised, if anything."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def hold(self, timeout: float) -> Iterator[None]:
        """Let the thread rest while entered. Raises what the thread raised, and RlctlError when its turn does not end
        within ``timeout`` seconds."""
        with self._changed:
            self._holders += 1
        try:
            with self._changed:
                rests = self._changed.wait_for(
                    lambda: self._resting or self._error is not None or self._thread is None, timeout
                )
                self.check()
                if not rests:
                    raise RlctlError(f"{self._name} does not come to rest: its turn has taken over {timeout:g} s")
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def _goes(self) -> bool:
        return self._error is None and not self._holders and not self._stopping and self._ready()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._goes():
                        self._rest()
                    if self._stopping:
                        return
                self._turn()
        except BaseException as error:  # noqa: BLE001 - raised by ``check`` in the threads that wait
            self._error = error
        finally:
            with self._changed:
                self._resting = True
                self._on_rest()

    def _rest(self) -> None:
        self._resting = True
        self._on_rest()
        self._changed.wait_for(lambda: self._stopping or self._goes())
        self._resting = False
