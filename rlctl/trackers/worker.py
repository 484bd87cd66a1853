"""What the child process that holds a tracker does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

import msgspec

from rlctl.process import Channel
from rlctl.trackers.base import RunInfo, Tracker

REPLY_SECONDS = 30.0
_MOST_TEXT = 300


class Open(msgspec.Struct, tag=True, frozen=True):
    """The first message: the class, as ``module:Class``, and the run."""

    tracker: str
    run: RunInfo


class Log(msgspec.Struct, tag=True, frozen=True):
    """Figures of one step."""

    step: int
    figures: dict[str, float]


class Close(msgspec.Struct, tag=True, frozen=True):
    """The last message: how the attempt ended."""

    status: str


class Reply(msgspec.Struct, frozen=True):
    """The answer to each message, in order: what went wrong, and what a person should know."""

    fault: str = ""
    notice: str = ""


_LATER = cast("type[Log | Close]", Log | Close)


def serve(channel: Channel) -> None:
    """Open a tracker and hand it what arrives; every message is answered, a fault as well."""
    opening = channel.receive(REPLY_SECONDS, Open)
    trackers: list[Tracker] = []

    def begin() -> None:
        module, _, name = opening.tracker.partition(":")
        trackers.append(getattr(import_module(module), name)(opening.run))

    fault = _fault_of(begin)
    channel.send(Reply(fault, trackers[0].notice if trackers else ""), REPLY_SECONDS)
    if fault:
        return
    tracker = trackers[0]
    while True:
        message: Log | Close = channel.receive(math.inf, _LATER)
        if isinstance(message, Log):
            fault = _fault_of(partial(tracker.log, message.step, message.figures))
        else:
            fault = _fault_of(partial(tracker.close, message.status))
        channel.send(Reply(fault), REPLY_SECONDS)


def _fault_of(act: Callable[[], None]) -> str:
    """Run other people's code and return in one line what it raised, or ""."""
    try:
        act()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was, the parent tells the user
        return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_TEXT]
    return ""
