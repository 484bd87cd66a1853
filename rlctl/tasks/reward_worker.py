"""What the child process that holds a user's function for rewards or steps does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from rlctl.errors import UsageError
from rlctl.process import Channel
from rlctl.tasks.conversation import take_step
from rlctl.tasks.outcome import Outcome, in_one_line, outcome_of
from rlctl.tasks.verifiers import load_function

REPLY_SECONDS = 30.0


class Load(msgspec.Struct, frozen=True):
    """A function to import, and what it takes."""

    reference: str
    takes: tuple[str, ...]


class Call(msgspec.Struct, frozen=True, tag="response"):
    """One response to judge."""

    prompt: str
    response: str
    answer: str


class StepCall(msgspec.Struct, frozen=True, tag="step"):
    """A conversation to answer."""

    messages: list[dict[str, Any]]
    answer: str


def serve(channel: Channel) -> None:
    """Import the function that comes first, answer with the fault or "", then answer calls for ever."""
    load = channel.receive(REPLY_SECONDS, Load)
    try:
        function = load_function(load.reference, load.takes)
    except UsageError as error:
        channel.send(error.message, REPLY_SECONDS)
        return
    except Exception as error:  # noqa: BLE001 - other people's code may raise anything; the parent tells the user
        channel.send(in_one_line(f"{type(error).__name__}: {error}"), REPLY_SECONDS)
        return
    channel.send("", REPLY_SECONDS)
    while True:
        call = channel.receive(math.inf, Call | StepCall)  # type: ignore[arg-type]
        channel.send(_answer(function, call, load.reference), REPLY_SECONDS)


def _answer(function: Callable[..., Any], call: Call | StepCall, reference: str) -> Outcome:
    if isinstance(call, StepCall):
        return take_step(partial(function, call.messages, call.answer), f"step {reference}")
    return outcome_of(partial(function, call.prompt, call.response, call.answer))
