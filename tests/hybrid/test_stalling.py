"""A rank that dies or stalls while all generate, train or switch is named, with what it was at, in time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hybrid.world import TIMEOUT, World, world

AT = "tests.hybrid.stalling_on_ranks:go_on_without"
DEADLINE = 3.0


def check(ranks: World, doing: str, said: str, deadline: float = DEADLINE) -> None:
    """Hold what all ranks but the last are told to: that is named, and the phase it was in when it stopped, in time."""
    last = ranks.size - 1
    for rank in range(last):
        fault, (error, seconds) = ranks.children[rank].answer(TIMEOUT)
        assert not fault, fault
        assert error.startswith(f"rank {rank}"), error
        assert f"rank {last} (phase {said!r})" in error
        print(doing, rank, seconds)
        assert seconds < deadline + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["generation", "training", "a switch"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalled", "killed"])
def test_who_holds_all_up_is_named(tmp_path: Path, number: signal.Signals, doing: str) -> None:
    with world(4, tmp_path) as ranks:
        ranks.begin(AT, who=3, number=int(number), deadline=DEADLINE, doing=doing)
        check(ranks, doing, "before the switch" if doing == "a switch" else f"before {doing}")


@pytest.mark.parametrize("doing", ["backward", "optimizer step"])
def test_a_rank_that_dies_in_a_scripts_own_step_is_named(tmp_path: Path, doing: str) -> None:
    deadline = 20.0
    with world(2, tmp_path) as ranks:
        ranks.begin(AT, who=1, number=int(signal.SIGKILL), deadline=deadline, doing=doing, inside=True)
        check(ranks, doing, doing, deadline)


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
