"""A rank that dies or stalls while all generate is named, in time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hybrid.world import TIMEOUT, world

DEADLINE = 3.0
# A second is the rule; the rest is for a machine that others share.
LATE = 1.0 + 2.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalled", "killed"])
def test_who_holds_up_generation_is_named(tmp_path: Path, number: signal.Signals) -> None:
    with world(4, tmp_path) as ranks:
        ranks.begin("tests.hybrid.stalling_on_ranks:generate_without", who=3, number=int(number), deadline=DEADLINE)
        for rank in range(3):
            fault, (error, seconds, _) = ranks.children[rank].answer(TIMEOUT)
            assert not fault, fault
            assert error.startswith(f"rank {rank} waited for rank 3 (phase 'before generation') while it generated"), (
                error
            )
            assert seconds < DEADLINE + LATE
