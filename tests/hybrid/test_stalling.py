"""A rank that dies or stalls while all generate, train or switch is named, with what it was at, in time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hybrid.world import TIMEOUT, world

DEADLINE = 3.0


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["generation", "training", "a switch"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalled", "killed"])
def test_who_holds_all_up_is_named(tmp_path: Path, number: signal.Signals, doing: str) -> None:
    with world(4, tmp_path) as ranks:
        ranks.begin(
            "tests.hybrid.stalling_on_ranks:go_on_without", who=3, number=int(number), deadline=DEADLINE, doing=doing
        )
        for rank in range(3):
            fault, (error, seconds) = ranks.children[rank].answer(TIMEOUT)
            assert not fault, fault
            assert error.startswith(f"rank {rank}"), error
            phase = "before the switch" if doing == "a switch" else f"before {doing}"
            assert f"rank 3 (phase {phase!r})" in error
            print(doing, rank, seconds)
            assert seconds < DEADLINE + 1.0
