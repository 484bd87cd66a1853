"""One sender's short messages to several receivers on its node, and what they answer.

Messages say which memory may be touched; the bytes are in the memory. They cost a few microseconds, put a sleeping
process to work without polling, order memory between the processes on every architecture, and end a wait at once when
the other side dies.
"""

from __future__ import annotations

import math
import select
import struct
from collections.abc import Callable, Sequence

from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, DeadlineError, PeerLostError, TransferError

_ACK = struct.Struct("<Q")
_LONGEST_ANSWER = 64


class Fanout:
    """The sender's side. A receiver that dies, or does not keep up until the deadline, is dropped and named.

    Receivers acknowledge by number: how many messages since the beginning they are through with.

    Attributes:
        lost: peer -> why it was dropped.
        aside: told what a receiver says that is no acknowledgement.
    """

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.aside: Callable[[Channel, bytes], None] | None = None
        self._acked: dict[Channel, int] = {}
        self._deadline = Deadline(math.inf)
        self._stall = math.inf

    @property
    def peers(self) -> list[str]:
        """The receivers that are attached."""
        return [channel.peer for channel in self._acked]

    def attached(self, channel: Channel) -> bool:
        """Whether the receiver at the other end of a channel takes part."""
        return channel in self._acked

    def drop(self, peer: str, reason: str) -> None:
        """Part with a receiver."""
        for channel in [c for c in self._acked if c.peer == peer]:
            self._drop(channel, reason)

    def detach(self, channel: Channel) -> None:
        """Let go a channel that somebody else closes."""
        self._acked.pop(channel, None)

    def forget_ended(self) -> None:
        """Let go, between two syncs, the receivers that have left."""
        for channel in [c for c in self._acked if c.ended()]:
            self.detach(channel)
            channel.close()

    def end_waits(self) -> None:
        """Have every wait for a receiver end now, as if all were lost; may be called from another thread."""
        for channel in list(self._acked):
            channel.end_waits()

    def close(self) -> None:
        """Part with all receivers."""
        for channel in self._acked:
            channel.close()
        self._acked.clear()

    def _begin(self, deadline: Deadline, stall: float) -> None:
        self._deadline, self._stall = deadline, stall

    def _patience(self) -> Deadline:
        return self._deadline if math.isinf(self._stall) else self._deadline.within(self._stall)

    def _tell(self, message: bytes) -> None:
        deadline = self._patience()
        for channel in list(self._acked):
            try:
                channel.send(message, deadline)
            except (PeerLostError, DeadlineError) as error:
                self._drop(channel, error.message)

    def _wait(self, count: int, what: str) -> None:
        """Return when every receiver is through with ``count`` messages, or dropped.

        Raises PeerLostError when none is left.
        """
        deadline = self._patience()
        for channel in list(self._acked):
            try:
                while self._acked[channel] < count:
                    self.heard(channel, channel.receive(deadline, limit=_LONGEST_ANSWER))
            except DeadlineError:
                self._drop(channel, f"{channel.peer} did not free a slot: {deadline.error(what).message}")
            except TransferError as error:
                self._drop(channel, error.message)
        if not self._acked:
            reasons = "; ".join(self.lost.values()) or "none was attached"
            raise PeerLostError(f"no receiver is left at {what}: {reasons}")

    def heard(self, channel: Channel, message: bytes) -> None:
        """Take in what a receiver said. Raises CorruptedError."""
        if len(message) == _ACK.size:
            (self._acked[channel],) = _ACK.unpack(message)
        elif self.aside is not None:
            self.aside(channel, message)
        else:
            raise CorruptedError(f"an answer of {len(message)} bytes from {channel.peer}")

    def _drop(self, channel: Channel, reason: str) -> None:
        self.detach(channel)
        self.lost[channel.peer] = reason
        channel.close()


def acknowledge(channel: Channel, count: int, deadline: Deadline) -> None:
    """Tell the sender that ``count`` messages since the beginning are done with."""
    channel.send(_ACK.pack(count), deadline)


def readable(channels: Sequence[Channel], deadline: Deadline) -> list[Channel]:
    """Wait until something can be read from one of ``channels``; return those of which it can, none in time."""
    poll = select.poll()
    found = {channel.fileno(): channel for channel in channels}
    for number in found:
        poll.register(number, select.POLLIN)
    return [found[number] for number, _ in poll.poll(deadline.milliseconds)]
