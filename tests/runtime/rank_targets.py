"""Ranks without a model, for the tests of their supervisor."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from typing import Any

import msgspec

from rlctl.errors import UsageError
from rlctl.process import Channel
from rlctl.runtime.ranks.messages import Order, RankSetup, Report, TensorHead
from rlctl.sync.error_data import ErrorData


def main(channel: Channel) -> None:
    """Do as told: ``die``, ``fail`` or ``sleep`` on rank ``who``, ``stream`` on all, ``echo`` whatever it is."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    setup = channel.receive(60.0, RankSetup)
    print(f"rank {setup.rank} is up", file=sys.stderr, flush=True)
    channel.send(Report("done"), 10.0)
    while True:
        order = channel.receive(math.inf, Order)
        channel.send(answer(channel, setup, order.operation, order.arguments), 10.0)


def answer(channel: Channel, setup: RankSetup, operation: str, arguments: dict[str, Any]) -> Report:
    if arguments.get("who") == setup.rank:
        if operation == "die":
            os._exit(3)
        if operation == "sleep":
            time.sleep(60)
        error = UsageError("a wrong value", where="some.key") if operation == "refuse" else ZeroDivisionError("by zero")
        return Report("failed", error=ErrorData.of(error))
    if operation in ("die", "fail", "refuse"):  # what waits for the one that is gone
        time.sleep(0.05)
        return Report("failed", error=ErrorData("", "RuntimeError: connection closed by peer"), waiting=True)
    if operation == "stream" and setup.rank == 0:
        for name in ("a", "b"):
            head = TensorHead("", name, "U8", [3], 3)
            channel.send(Report("tensor", msgspec.to_builtins(head)), 10.0)
            channel.send(b"xyz", 10.0)
    return Report("done", [setup.rank, arguments])
