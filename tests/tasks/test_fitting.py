"""A task without its long prompts: the order stays, scores are the other task's, an endless task stays endless."""

import pytest

from rlctl.errors import UsageError
from rlctl.tasks.base import TaskOptions
from rlctl.tasks.cycle import CycleTask
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.fitting import FittingTask
from rlctl.tasks.jsonl import JsonlTask
from rlctl.tasks.prompts import encode_prompt, fits, prompt_ids


def test_a_finite_task_keeps_its_order(tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "{"6" * n}", "answer": "{n}"}}\n' for n in (1, 9, 2, 8, 3)))
    inner = JsonlTask.create(str(file), TaskOptions(verifier="exact", held_out=0.0))
    task = FittingTask(inner, lambda sample: len(sample.prompt) < 5)
    assert (task.size, task.dropped) == (3, 2)
    kept = [task.sample(index) for index in range(3)]
    assert [sample.index for sample in kept] == [0, 1, 2]
    assert sorted(sample.answer for sample in kept) == ["1", "2", "3"]
    assert [task.score(sample, sample.answer) for sample in kept] == [1.0, 1.0, 1.0]
    assert task.digest not in (inner.digest, FittingTask(inner, lambda sample: len(sample.prompt) < 3).digest)


def test_an_endless_task_gives_another_prompt_for_one_that_does_not_fit() -> None:
    inner = CycleTask()
    task = FittingTask(inner, lambda sample: sample.prompt[0] == "7")
    samples = [task.sample(index) for index in range(30)]
    assert task.size is None
    assert all(sample.prompt[0] == "7" for sample in samples)
    assert [sample.index for sample in samples] == list(range(30))
    assert samples == [task.sample(index) for index in range(30)]
    assert len({sample.prompt for sample in samples}) > 20
    with pytest.raises(UsageError, match="none of 1000 prompts"):
        FittingTask(inner, lambda sample: False).sample(0)


def test_truncation_keeps_the_end() -> None:
    tokenizer, sample = build_tokenizer(), CycleTask().sample(0)
    whole = prompt_ids(tokenizer, sample)
    assert encode_prompt(tokenizer, sample, 4, truncate=True) == whole[-4:]
    assert encode_prompt(tokenizer, sample, len(whole), truncate=True) == whole
    assert fits(tokenizer, sample, len(whole))
    assert not fits(tokenizer, sample, len(whole) - 1)
