"""Levels by their names."""

import pytest

from rlctl.errors import UsageError
from rlctl.replay.findings import chosen_levels


@pytest.mark.parametrize(
    ("names", "levels"),
    [(["all"], "R0 R1 R2 R3 R4"), (["R0..R4"], "R0 R1 R2 R3 R4"), (["r1..R2"], "R1 R2"), (["R3", "R0"], "R0 R3"),
     (["R2..R2", "R1"], "R1 R2")],
)  # fmt: skip
def test_one_several_or_all(names, levels):
    assert chosen_levels(names) == levels.split()


@pytest.mark.parametrize("name", ["R5", "", "..", "R0..", "..R2", "R2..R0", "R0..R9", "R0...R2", "R0-R2"])
def test_what_names_no_level_is_refused_with_those_that_there_are(name):
    with pytest.raises(UsageError, match="no level"):
        chosen_levels([name])
