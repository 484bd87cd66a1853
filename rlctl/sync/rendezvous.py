"""Where the ranks of a collective group find each other: a store of keys and values that one of them serves.

torch's own TCPStore listens on every interface and lets anybody in. This one binds where it is told, and a peer first
proves that it knows the run's token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from rlctl.sync.channel import Channel, Listener, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, TransferError


class _Request(msgspec.Struct, array_like=True):
    key: str
    value: bytes | None  # None: get it
    timeout: float


class KeyValues:
    """Keys and values, set once, waited for by threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        """Return a key's value, once it has one. Raises DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise Deadline(timeout).error(f"waiting for {key} of the group")
            return self._values[key]


class MeetingStore(Store):
    """What torch.distributed sees. Each rank uses its own: ``MeetingPoint.store`` or ``join`` makes it. ``group``: the
    one whose keys these are, where several meet at one point."""

    def __init__(self, deadline: Deadline, values: KeyValues | None, channel: Channel | None, group: str = "") -> None:
        super().__init__()
        self._group = group
        self._deadline = deadline
        self._values = values
        self._channel = channel

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(key, data)

    def get(self, key: str) -> bytes:
        """Return a key's value, once it has one."""
        return self._ask(key, None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        for key in keys:
            self._ask(key, None)

    def _ask(self, key: str, value: bytes | None) -> bytes:
        key = self._group + key
        if self._values is not None:
            if value is not None:
                self._values.set(key, value)
                return b""
            return self._values.get(key, self._deadline.remaining)
        assert self._channel is not None
        request = _Request(key, value, self._deadline.remaining)
        self._channel.send(msgspec.msgpack.encode(request), self._deadline)
        return self._channel.receive(self._deadline)


class MeetingPoint:
    """The side that serves, for its groups; a context manager that, when all went well, ends once all have met.

    Args:
        listener: where the others come; closed at the end.
        peers: how many others there are.
        deadline: for all of it.
    """

    def __init__(self, listener: Listener, peers: int, deadline: Deadline) -> None:
        self._values = KeyValues()
        self._deadline = deadline
        self._listener = listener
        self._channels: list[Channel] = []
        self._left = threading.Semaphore(0)
        self._peers = peers
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def store(self, group: str = "") -> MeetingStore:
        """Return the store of the serving rank itself."""
        return MeetingStore(self._deadline, self._values, None, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after a success, when each of the others has made its group and left."""
        met = kind is not None or all(self._left.acquire(timeout=self._deadline.remaining) for _ in range(self._peers))
        self._listener.close()
        self._thread.join()
        for channel in self._channels:
            channel.end_waits()  # the thread that serves it closes it
        if not met:
            raise self._deadline.error("waiting for the ranks of the group to meet")

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept("a rank of the group", self._deadline)
            except (DeadlineError, OSError):  # OSError: closed
                return
            self._channels.append(channel)
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        while True:
            try:
                request = msgspec.msgpack.decode(channel.receive(self._deadline), type=_Request)
                if request.value is not None:
                    self._values.set(request.key, request.value)
                    answer = b""
                else:
                    answer = self._values.get(request.key, request.timeout)
                channel.send(answer, self._deadline)
            except (TransferError, OSError):  # the other side has what it needs, or will hear of it itself
                channel.close()
                self._left.release()
                return


def join(address: str, token: str, peer: str, deadline: Deadline, group: str = "") -> tuple[MeetingStore, Channel]:
    """Return the store that ``peer`` serves at ``address``, and the connection, to be closed once the group is made."""
    channel = connect(address, token.encode(), peer, deadline)
    return MeetingStore(deadline, None, channel, group), channel
