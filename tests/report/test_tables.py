"""Tables and curves."""

from __future__ import annotations

import math
import random

import pytest

from rlctl.report.curve import format_curve, format_sparkline
from rlctl.report.tables import format_table, harmless


def test_columns_align_and_nothing_is_cut() -> None:
    long = "x" * 300
    text = format_table(["name", "size", "ok"], [["a", 1, True], [long, 12345, False], ["c", None, None]])
    lines = text.splitlines()
    assert long in lines[2]
    starts = {line.rindex(word) for line, word in zip(lines[1:3], ["yes", "no"], strict=True)}
    assert len(starts) == 1
    assert lines[1].index("1") == lines[2].index("12345") + 4
    assert lines[3].split() == ["c", "-", "-"]
    assert not any(line != line.rstrip() for line in lines)


def test_cells_stay_on_one_line_and_wide_characters_count_twice() -> None:
    text = format_table(["a", "b"], [["two\nlines", 1.23456], ["昇騰", 2.0]])
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[1] == "two lines  1.235"
    assert lines[2] == "昇騰           2"
    assert format_table(["a", "b"], []) == "a  b\n"


@pytest.mark.parametrize("unicode", [True, False])
def test_curve_fits_and_rises_with_its_values(unicode: bool) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for count in (1, 2, 7, 60, 73, 74, 75, 500, 12345):
        values = [rng.uniform(-1, 1) + i / count for i in range(count)]
        text = format_curve(values, title="reward", unicode=unicode)
        lines = text.splitlines()
        assert len(lines) == 10, f"seed {seed}"
        assert max(map(len, lines)) <= 80, f"seed {seed} count {count}"
        assert str(count) in lines[-1]
        assert unicode or text.isascii()
    rising = format_curve([i / 59 for i in range(60)], title="reward", unicode=unicode).splitlines()
    bars = ["".join(line[3:].ljust(60)[i] for line in rising[1:-1]).count(" ") for i in range(60)]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == 7
    assert bars[-1] == 0
    assert rising[1].lstrip().startswith("1 ")
    assert rising[8].lstrip().startswith("0 ")


def test_curve_of_odd_values() -> None:
    assert format_curve([], title="reward") == "reward: no values\n"
    assert format_curve([math.nan, math.inf], title="reward") == "reward: no values\n"
    gap = format_curve([1.0, math.nan, 1.0], title="t", width=10, height=1, unicode=False).splitlines()
    assert gap[1] == "1 |##  ##"
    flat = format_curve([0.0] * 5, title="t", height=2, unicode=False).splitlines()
    assert "." in flat[2]
    assert "." not in flat[1]
    assert format_curve([1.0] * 3, title="t", first=41).splitlines()[-1].split() == ["41", "43"]


def test_sparkline_shows_the_latest_values() -> None:
    assert format_sparkline([0.0, 1.0, 0.0, 0.5, 1.0], width=3) == "▁▅█"
    assert format_sparkline([0.0, math.nan, 1.0], width=9, unicode=False) == ". #"
    assert format_sparkline([], width=9) == ""


@pytest.mark.parametrize("code", ["\x1b]0;title\x07", "\x1b[2J", "\x1b[1A", "\r", "\x08", "\x9b1A", "\x1b[31;1H"])
def test_texts_out_of_files_move_no_cursor(code: str) -> None:
    shown = harmless(f"a{code}b\n\tc")
    assert shown.startswith("a\\x") and shown.endswith("b\n\tc")
    assert not any(c in shown for c in "\x1b\x07\r\x08\x9b")
    assert harmless("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m"
