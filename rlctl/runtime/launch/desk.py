"""Where hosts, and the processes that they start, connect to the run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rlctl.runtime.launch.host_messages import Hello, receive
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import TransferError

_HELLO_SECONDS = 5.0
_CHECK_SECONDS = 0.2


class Desk:
    """Listens, and hands each connection to who waits for it.

    Args:
        address: ``tcp:HOST:PORT``; port 0 takes a free one.
        token: the run's secret, which whoever connects proves to know.
    """

    def __init__(self, address: str, token: str) -> None:
        self._listener = Listener(address, token.encode())
        self.address = self._listener.address
        self._arrived: dict[Hello, Channel] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="rlctl-desk", daemon=True)
        self._thread.start()

    def take(self, who: Hello, deadline: Deadline, absent: Callable[[], None] = lambda: None) -> Channel:
        """Return the connection of ``who``, once it is there; ``absent`` is called while it is not, and may raise.
        Raises DeadlineError."""
        with self._changed:
            while who not in self._arrived:
                deadline.check(f"waiting for host {who.host} to connect to {self.address}")
                self._changed.wait(min(_CHECK_SECONDS, deadline.remaining))
                absent()
            return self._arrived.pop(who)

    def close(self) -> None:
        """Take no more, and close what nobody took."""
        self._listener.close()
        self._thread.join()
        with self._changed:
            for channel in self._arrived.values():
                channel.close()
            self._arrived.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                channel = self._listener.accept("a host", Deadline(math.inf))
                try:
                    who = receive(channel, Hello, Deadline(_HELLO_SECONDS))
                except (TransferError, msgspec.DecodeError):
                    channel.close()
                    continue
                with self._changed:
                    self._arrived[who] = channel
                    self._changed.notify_all()
