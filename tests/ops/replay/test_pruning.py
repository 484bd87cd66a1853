"""Pruning beside others, and after one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.records.manifest import step_folder
from rlctl.ops.replay.history import read_history
from rlctl.ops.replay.pruning import prune
from tests.ops.replay.told import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps, each with a checkpoint and something in the place of a record."""
    run = write_run(tmp_path / "run", steps=6)
    for step in range(1, 7):
        for folder in (step_folder(run / "records", step), run / "ckpt" / f"step_{step}"):
            folder.mkdir(parents=True)
            (folder / "state.json").write_text("{}")
    return run


def hidden(run: Path) -> list[str]:
    return [path.name for folder in ("records", "ckpt") for path in (run / folder).glob(".*")]


def test_what_a_killed_one_left_goes_with_the_next(run: Path) -> None:
    step_folder(run / "records", 1).rename(run / "records" / ".step_00000001.77.old")
    (run / "ckpt" / "step_1").rename(run / "ckpt" / ".step_1.pruned.old")
    assert read_history(run).recorded == read_history(run).checkpoints == [2, 3, 4, 5, 6]
    assert prune(read_history(run), 2, dry_run=True).records == [2, 3, 4]
    assert len(hidden(run)) == 2
    assert prune(read_history(run), 2, dry_run=False).records == [2, 3, 4]
    assert hidden(run) == []
    left = read_history(run)
    assert (left.recorded, left.checkpoints) == ([5, 6], [4, 5, 6])


def test_what_another_one_removed_meanwhile_is_not_missed(run: Path) -> None:
    seen = read_history(run)
    first = prune(seen, 2, dry_run=False)
    assert first.records == [1, 2, 3, 4]
    second = prune(seen, 2, dry_run=False)
    assert (second.records, second.checkpoints, second.nbytes) == ([], [], 0)
    assert read_history(run).recorded == [5, 6]


def test_a_folder_that_cannot_be_written_is_refused(run: Path) -> None:
    (run / ".lock").mkdir()
    with pytest.raises(RlctlError, match="the run cannot be pruned"):
        prune(read_history(run), 2, dry_run=False)
    assert len(read_history(run).recorded) == 6
