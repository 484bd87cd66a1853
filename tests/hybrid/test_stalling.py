"""A rank that dies or stalls while all generate, train or switch is named, with what it was at, in time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hybrid.world import TIMEOUT, World, world

AT = "tests.hybrid.stalling_on_ranks:go_on_without"
DEADLINE = 3.0


def check(ranks: World, doing: str, said: str) -> None:
    """Hold what ranks 0 to 2 are told to: rank 3 is named, and the phase it was in when it stopped, in time."""
    for rank in range(3):
        fault, (error, seconds) = ranks.children[rank].answer(TIMEOUT)
        assert not fault, fault
        assert error.startswith(f"rank {rank}"), error
        assert f"rank 3 (phase {said!r})" in error
        print(doing, rank, seconds)
        assert seconds < DEADLINE + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["generation", "training", "a switch"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalled", "killed"])
def test_who_holds_all_up_is_named(tmp_path: Path, number: signal.Signals, doing: str) -> None:
    with world(4, tmp_path) as ranks:
        ranks.begin(AT, who=3, number=int(number), deadline=DEADLINE, doing=doing)
        check(ranks, doing, "before the switch" if doing == "a switch" else f"before {doing}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doing", "training"),
    [
        ("backward", "dp+fsdp"),
        ("backward", "dp+fsdp+tp"),
        ("backward of a sum", "dp+fsdp"),
        ("optimizer step", "dp+fsdp"),
        ("optimizer step", "dp+fsdp+tp"),
        ("clipping", "dp+fsdp"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalled", "killed"])
def test_who_holds_up_a_scripts_own_step_is_named(
    tmp_path: Path, number: signal.Signals, inside: bool, doing: str, training: str
) -> None:
    phase = doing.partition(" of ")[0]
    with world(4, tmp_path) as ranks:
        ranks.begin(AT, who=3, number=int(number), deadline=DEADLINE, doing=doing, inside=inside, training=training)
        check(ranks, doing, phase if inside else f"before {phase}")
