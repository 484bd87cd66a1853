"""What the child process that holds a user's reward function does."""

from __future__ import annotations

import math
from functools import partial

import msgspec

from rlctl.errors import UsageError
from rlctl.process import Channel
from rlctl.tasks.outcome import in_one_line, outcome_of
from rlctl.tasks.verifiers import load_verifier

REPLY_SECONDS = 30.0


class Call(msgspec.Struct, frozen=True):
    """One response to judge."""

    prompt: str
    response: str
    answer: str


def serve(channel: Channel) -> None:
    """Import the function whose reference comes first, answer with the fault or "", then answer calls for ever."""
    reference = channel.receive(REPLY_SECONDS, str)
    try:
        function = load_verifier(reference)
    except UsageError as error:
        channel.send(error.message, REPLY_SECONDS)
        return
    except Exception as error:  # noqa: BLE001 - other people's code may raise anything; the parent tells the user
        channel.send(in_one_line(f"{type(error).__name__}: {error}"), REPLY_SECONDS)
        return
    channel.send("", REPLY_SECONDS)
    while True:
        call = channel.receive(math.inf, Call)
        channel.send(outcome_of(partial(function, call.prompt, call.response, call.answer)), REPLY_SECONDS)
