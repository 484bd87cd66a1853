"""A rollout engine of another package, as it were: its decode step takes its time, so that tests find it at work."""

from __future__ import annotations

import time

from rlctl.process import Channel
from rlctl.rollout.base import Output
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.rollout.remote.process import serve as serve_replica

STEP_SECONDS = 0.003


class PacedEngine(EmbeddedEngine):
    def step(self) -> list[Output]:
        time.sleep(STEP_SECONDS)
        return super().step()


def serve(channel: Channel) -> None:
    ROLLOUT_ENGINES.register("paced", PacedEngine)
    serve_replica(channel)
