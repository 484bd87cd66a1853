"""Expandable segments under both names of their variable."""

from __future__ import annotations

import pytest

from rlctl.memory.allocator_settings import VARIABLES, expandable_segments, sleeping_engine_note

NEW, OLD = VARIABLES


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, None),
        ({OLD: ""}, None),
        ({OLD: "expandable_segments:True"}, OLD),
        ({NEW: "max_split_size_mb:512, expandable_segments:True"}, NEW),
        ({NEW: "expandable_segments:False", OLD: "expandable_segments:True"}, None),
        ({NEW: "max_split_size_mb:64", OLD: "expandable_segments:True"}, OLD),
        ({OLD: "expandable_segments:True,expandable_segments:False"}, None),
        ({OLD: "expandable_segments"}, None),
        ({OLD: ",,:,expandable_segments:true"}, None),
    ],
)
def test_which_variable_turns_them_on(environment: dict[str, str], variable: str | None) -> None:
    assert expandable_segments(environment) == variable
    note = sleeping_engine_note(environment)
    assert note is None if variable is None else note is not None and note.startswith(variable)
