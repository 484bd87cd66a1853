"""How a trainer and vLLM's workers agree on one sync when vLLM's own update calls bring them together.

vLLM's calls carry data one way only, to the workers. A checkpoint engine needs an exchange: each worker comes to the
trainer's address, proves that it knows the run's token, and they talk. The messages, in order:

    trainer: Seat          your rank, how many you are
    worker:  Prepared      what your engine's ``prepare`` returned
    trainer: Connect       the arguments of ``init_process_group``; the bytes travel now
    worker:  Outcome       what arrived, or the error
    trainer: End           whether all of it arrived everywhere: commit, or forget
    worker:  Outcome       it is served, or the error
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rlctl.sync.channel import Channel
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import CorruptedError
from rlctl.sync.protocols import LoadReport

M = TypeVar("M")


class Seat(msgspec.Struct, frozen=True):
    """A worker's place among all of them."""

    rank: int
    world: int


class Prepared(msgspec.Struct, frozen=True):
    """A worker's metadata, or the error that it had."""

    metadata: dict[str, Any] = {}
    error: ErrorData | None = None


class Connect(msgspec.Struct, frozen=True):
    """What ``build_topology`` made for one worker."""

    kwargs: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True):
    """What a worker got."""

    report: LoadReport | None = None
    digest: bytes = b""
    error: ErrorData | None = None


class End(msgspec.Struct, frozen=True):
    """The end of the transfer; ``committed``: the version that is to be served, None after a failure."""

    committed: int | None


def tell(channel: Channel, message: object, deadline: Deadline) -> None:
    """Send a message."""
    channel.send(msgspec.msgpack.encode(message), deadline)


def hear(channel: Channel, kind: type[M], deadline: Deadline) -> M:
    """Return the next message. Raises CorruptedError when it is not a ``kind``."""
    try:
        return msgspec.msgpack.decode(channel.receive(deadline), type=kind)
    except msgspec.DecodeError as error:
        raise CorruptedError(f"{channel.peer} did not send the {kind.__name__} that was due") from error
