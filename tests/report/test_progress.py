"""Progress off a terminal: how many lines, and which."""

from __future__ import annotations

from rlctl.report.progress import Pace, PlainProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_each_tenth_of_steady_work() -> None:
    said: list[str] = []
    clock = Clock()
    with PlainProgress(said.append, "weights", 1000, "tensors", clock) as progress:
        for _ in range(1000):
            clock.now += 0.02
            progress.advance()
    assert len(said) == 10
    assert said[0] == "weights:  10% (100 tensors of 1000 tensors), 2.0 s"
    assert said[-1] == "weights: 100% (1000 tensors of 1000 tensors), 20.0 s"


def test_work_that_is_over_in_a_moment_has_one_line() -> None:
    said: list[str] = []
    with PlainProgress(said.append, "weights", 1000, "", Clock()) as progress:
        for _ in range(1000):
            progress.advance()
    assert said == ["weights: 100% (1000 of 1000), 0 ms"]


def test_a_line_each_ten_seconds_of_slow_work() -> None:
    said: list[str] = []
    clock = Clock()
    with PlainProgress(said.append, "copy", 1 << 40, "bytes", clock) as progress:
        for _ in range(60):
            clock.now += 1
            progress.advance(1 << 20)
    assert len(said) == 6
    assert said[2] == "copy:   0% (30 MiB of 1 TiB), 30.0 s"


def test_unknown_total_and_nothing_done() -> None:
    said: list[str] = []
    clock = Clock()
    with PlainProgress(said.append, "scan", None, "files", clock) as progress:
        progress.advance(3)
        clock.now = 11
        progress.advance()
        progress.advance()
    assert said == ["scan: 4 files, 11.0 s", "scan: 5 files, 11.0 s"]


def test_the_end_is_said_once_also_when_cut_short() -> None:
    said: list[str] = []
    with PlainProgress(said.append, "x", 10, "", Clock()) as progress:
        progress.advance(5)
    assert said == ["x:  50% (5 of 10), 0 ms"]


def test_pace_counts_tenths_whatever_the_step_size() -> None:
    for steps in (1, 7, 10, 60, 64, 1000):
        clock = Clock()
        pace = Pace(clock)
        lines = 0
        for step in range(1, steps + 1):
            clock.now += 20 / steps
            lines += pace.due(step / steps)
        assert lines == min(steps, 10) or (steps in (60, 64) and lines in (9, 10))
