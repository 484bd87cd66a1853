"""Replicas in this process that can be killed, and come back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import Any

from rlctl.errors import RlctlError
from rlctl.rollout.base import Output, Request
from rlctl.rollout.local_replica import LocalReplica
from rlctl.rollout.served import ServedEngine
from rlctl.sync.deadline import Deadline
from tests.rollout.tiny import make_engine
from tests.waiting import until

MAX_LENGTH = 256


class Mortal(ServedEngine):
    """An engine that dies in its next step once it is told to.

    Args:
        pause: seconds that a step takes beside its work.

    Attributes:
        steps: so many have decoded something.
        stalls_after: it decodes nothing after so many.
    """

    def __init__(self, model: Any, name: str, pause: float, **more: Any) -> None:
        super().__init__(make_engine(model, replica=name, max_length=MAX_LENGTH, **more), "token")
        self.killed = ""
        self.steps = 0
        self.stalls_after = inf
        self._pause = pause

    def step(self, timeout: float = 0.0) -> list[Output]:
        ended: list[Output] = []
        if self.steps < self.stalls_after or self._ended:
            ended = super().step(min(timeout, 0.02))
            self.steps += self.num_running > 0
        if self.killed:
            raise RlctlError(self.killed)
        time.sleep(self._pause if self.steps < self.stalls_after else 0.002)
        return ended


class ThreadReplica(LocalReplica):
    """A replica with the embedded engine.

    Args:
        serving: whether it serves version 0 from the start.
        more: of the engine.

    Attributes:
        taken: all requests that it ever took.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        lockstep: bool = False,
        serving: bool = True,
        pause: float = 0.0,
        progress_ticks: int = 4,
        **more: Any,
    ) -> None:
        self.taken: list[Request] = []
        self._mortal = Mortal(model, name, pause, **more)
        super().__init__(self._mortal, max_length=MAX_LENGTH, lockstep=lockstep, progress_ticks=progress_ticks)
        if serving:
            self.resume(0, Deadline(30))

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.taken += requests

    def stall(self, steps: float) -> None:
        """Decode so many steps and no more."""
        self._mortal.stalls_after = steps

    def until_stalled(self) -> None:
        """Wait for that."""
        until(lambda: self._mortal.steps >= self._mortal.stalls_after)

    def go_on(self) -> None:
        """Decode again."""
        self._mortal.stalls_after = inf

    def kill(self, reason: str = "SIGKILL") -> None:
        """Die; in lockstep with the next step."""
        self._mortal.killed = reason
        if not self._lockstep:
            until(lambda: self.lost)

    def faint(self, reason: str) -> None:
        """Seem dead; in lockstep, where its thread does not go on by itself."""
        self._on_failed(RlctlError(reason))

    def come_to(self) -> None:
        """Be there again, with nothing under way."""
        self._mortal.abort()
        with self._lock:
            self._under_way.ended(self._mortal.step())
            assert not self._under_way.requests()
            self.lost = ""

    def late(self, outputs: list[Output]) -> None:
        """Say something that is too late."""
        assert self._listener is not None
        self._listener[0](self.replica, outputs)
