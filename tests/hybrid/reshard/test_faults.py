"""A rank that dies or stands still in any phase: the others say which, and where it was, in time."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from rlctl.sync.layout import ParallelLayout
from tests.hybrid.reshard.gang import Gang
from tests.hybrid.reshard.test_layout_pairs import DENSE, plan_of

DEADLINE = 1.5
RANKS = 4
# Every rank needs something of each other one, by messages or by collectives.
ROLLOUTS = {"messages": ParallelLayout.vllm(tp=4), "collectives": ParallelLayout.vllm(replicas=4)}


PHASES = ["before the switch", "cut", "wire", "place"]
CASES = [(how, phase, way) for how in (signal.SIGKILL, signal.SIGSTOP) for phase in PHASES for way in ROLLOUTS]
QUICK = {(signal.SIGKILL, "wire", "messages"), (signal.SIGSTOP, "cut", "collectives")}


@pytest.mark.parametrize(
    ("how", "phase", "way"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_who_holds_a_switch_up_is_named_in_time(how: signal.Signals, phase: str, way: str, tmp_path: Path) -> None:
    victim = random.randrange(RANKS)
    print("victim", victim)
    plan = plan_of(DENSE, ParallelLayout.fsdp(4), ROLLOUTS[way])
    below = 0 if way == "messages" else 1 << 30
    with Gang(RANKS, tmp_path / "store") as gang:
        gang.call("warm_up", plan=plan, deadline=DEADLINE, gather_below=below, bucket_nbytes=8 << 10)
        if phase == "before the switch":
            gang.signal(victim, how)
        else:
            gang.begin("switch_again", ranks=[victim], stop_in=phase, how=how)
        others = [rank for rank in range(RANKS) if rank != victim]
        gang.begin("switch_again", ranks=others)
        for rank in others:
            ranks, message, seconds = gang.answer(rank)
            assert ranks == {victim: phase}, message
            assert f"rank {victim} (phase {phase!r})" in message
            assert seconds < DEADLINE + 1.0
