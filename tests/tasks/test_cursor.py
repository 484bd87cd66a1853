"""The prompt cursor: every prompt once an epoch, an end that is an end, and resuming at any place."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.tasks.base import Task
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.registry import load_task


def file_task(path: Path, count: int) -> Task:
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in range(count)))
    return load_task(str(path), verifier="exact", held_out=0.0)


def test_one_epoch_of_ten_in_batches_of_four_is_4_4_2_and_then_the_end(tmp_path: Path) -> None:
    cursor = PromptCursor(file_task(tmp_path / "d.jsonl", 10), seed=1, epochs=1)
    batches = [cursor.take(4) for _ in range(5)]
    assert [len(b) for b in batches] == [4, 4, 2, 0, 0]
    assert cursor.remaining == 0
    assert [ordinal for batch in batches for ordinal, _ in batch] == list(range(10))
    assert len({sample.prompt for batch in batches for _, sample in batch}) == 10


def test_epochs_are_shuffled_anew_and_batches_run_over_their_ends(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    cursor = PromptCursor(file_task(tmp_path / "d.jsonl", 30), seed, epochs=3)
    taken = []
    while batch := cursor.take(7):
        taken.append(batch)
    assert [len(b) for b in taken] == [7] * 12 + [6]
    prompts = [sample.prompt for batch in taken for _, sample in batch]
    epochs = [prompts[i : i + 30] for i in (0, 30, 60)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("resume_at", [0, 1, 59, 60, 61, 119, 120])
def test_resuming_goes_on_with_the_very_next_prompt(tmp_path: Path, resume_at: int) -> None:
    # 60 is the boundary between two epochs: 60 further prompts follow, not none.
    task = file_task(tmp_path / "d.jsonl", 60)
    whole = PromptCursor(task, 5, epochs=2).take(120)
    first = PromptCursor(task, 5, epochs=2)
    before = first.take(resume_at)
    state = json.loads(json.dumps(first.state()))
    second = PromptCursor(task, 5, epochs=2)
    second.load(state)
    assert (second.remaining, second.epoch) == (120 - resume_at, resume_at // 60)
    assert before + second.take(1000) == whole
    assert second.take(1) == []


def test_without_epochs_it_never_ends(tmp_path: Path) -> None:
    cursor = PromptCursor(file_task(tmp_path / "d.jsonl", 3), seed=1)
    assert cursor.remaining is None
    counts = Counter(sample.prompt for _, sample in cursor.take(300))
    assert set(counts.values()) == {100}
    assert cursor.epoch == 100


def test_an_endless_task_is_drawn_by_seed_and_position() -> None:
    task = load_task("cycle")
    whole = PromptCursor(task, 9).take(40)
    later = PromptCursor(task, 9)
    later.load(PromptCursor(task, 9).state() | {"ordinal": 25})
    assert later.take(15) == whole[25:]
    assert PromptCursor(task, 10).take(40) != whole
    assert PromptCursor(task, 9).at(39) == whole[39][1]
    assert later.remaining is None
    assert later.epoch == 0


def test_looking_back_does_not_move_it(tmp_path: Path) -> None:
    cursor = PromptCursor(file_task(tmp_path / "d.jsonl", 5), seed=1, epochs=3)
    taken = cursor.take(12)
    assert [(o, cursor.at(o)) for o, _ in taken] == taken
    assert cursor.ordinal == 12


def test_a_position_in_other_data_or_of_another_seed_is_refused(tmp_path: Path) -> None:
    task = file_task(tmp_path / "d.jsonl", 5)
    state = PromptCursor(task, 1).state()
    with pytest.raises(UsageError, match="another seed: 1, this run has 2"):
        PromptCursor(task, 2).load(state)
    changed = file_task(tmp_path / "d.jsonl", 6)
    with pytest.raises(UsageError, match="other data"):
        PromptCursor(changed, 1).load(state)


def test_epochs_of_an_endless_task_and_epochs_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="endless"):
        PromptCursor(load_task("cycle"), 1, epochs=1)
    with pytest.raises(UsageError, match="at least 1"):
        PromptCursor(file_task(tmp_path / "d.jsonl", 5), 1, epochs=0)
