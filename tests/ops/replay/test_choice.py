"""Which steps a person asks for."""

from __future__ import annotations

import pytest

from rlctl.errors import UsageError
from rlctl.ops.replay.choice import parse_steps


@pytest.mark.parametrize(
    ("text", "bounds"),
    [(None, (None, None)), ("7", (7, 7)), ("3:9", (3, 9)), ("3:", (3, None)), (":9", (None, 9)), ("4:4", (4, 4))],
)
def test_bounds(text: str | None, bounds: tuple[int | None, int | None]) -> None:
    assert parse_steps(text) == bounds


@pytest.mark.parametrize(
    "text", ["x", "-1", "1.5", ":", "1:2:3", "9:3", "٣", "1-4", "9" * 19, "1" * 6000, f"1:{'9' * 5000}"]
)
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_steps(text)
