"""JSONL tasks: what is read, what is refused and how, and the split."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.tasks.base import Task
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.registry import load_task


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_lines_become_samples(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}]
    path = write(
        tmp_path / "d.jsonl",
        "\ufeff" + json.dumps({"prompt": "2 + 2", "answer": 4, "group": "easy", "other": None}),
        "",
        {"prompt": chat, "answer": "42"},
        {"prompt": "zwölf \u65e5 \U0001f600", "answer": [1, 2]},
    )
    task = load_task(path, verifier="contains", held_out=0.0)
    assert task.size == 3
    first, second, third = (task.sample(i) for i in range(3))
    assert (first.index, first.prompt, first.answer, first.group, first.messages) == (0, "2 + 2", "4", "easy", None)
    assert (second.prompt, second.answer, second.group, second.messages) == ("What is 6 * 7?", "42", "", chat)
    assert (third.prompt, third.answer) == ("zwölf \u65e5 \U0001f600", "[1, 2]")
    assert [s.source for s in (first, second, third)] == [f"{path}:1", f"{path}:3", f"{path}:4"]


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "2 + 2", "solution": "4"})
    task = load_task(path, verifier="exact", prompt_field="question", answer_field="solution", held_out=0.0)
    assert (task.sample(0).prompt, task.sample(0).answer) == ("2 + 2", "4")


def test_all_faults_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    good = b'{"prompt": "p", "answer": "1"}'
    lines = [
        good,
        b'{"prompt": "p", "answer": }',
        b'["p", "1"]',
        b'{"question": "p"}',
        b'{"prompt": "p", "answer": null}',
        b'{"prompt": "", "answer": "1"}',
        b'{"prompt": 7, "answer": "1"}',
        b'{"prompt": [{"role": "user"}], "answer": "1"}',
        b'{"prompt": "p\xff", "answer": "1"}',
        b'{"prompt": "\\ud800", "answer": "1"}',
        b'{"prompt": "p", "answer": "many"}',
        b'{"prompt": "p", "answer": ""}',
        b"{}",
    ]
    path.write_bytes(b"\r\n".join(lines))
    with pytest.raises(FindingsError) as caught:
        load_task(str(path), verifier="numeric")
    findings = caught.value.findings
    assert [f.where for f in findings] == [f"{path}:{n}" for n in range(2, len(lines) + 1)]
    said = [f.message for f in findings]
    expected = [
        "not JSON: JSON is malformed", "not a JSON object", "no 'prompt', 'answer' (the line has 'question')",
        "no 'answer'", "'prompt' is empty", "neither text nor a list", "lacks 'role' and 'content'", "not JSON",
        "not JSON", "'many' has no number", "'answer' is empty", "(the line has no fields)",
    ]  # fmt: skip
    for text, part in zip(said, expected, strict=True):
        assert part in text
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") == len(findings)


def test_of_many_faults_the_first_twenty_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *["nonsense"] * 50)
    with pytest.raises(FindingsError) as caught:
        load_task(path, verifier="exact")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[0] == f"{path} cannot be used: 50 faults, the first 20"
    assert lines[-1].startswith(f"  {path}:20: not JSON")


def test_a_regular_expression_that_is_none_is_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "(a"})
    with pytest.raises(FindingsError, match=r"d\.jsonl:1: the answer '\(a' is not a regular expression"):
        load_task(path, verifier="regex")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("empty.jsonl", "", "the file has no prompts"),
        ("blank.jsonl", "\n  \n", "the file has no prompts"),
        ("absent.jsonl", None, "cannot read .*absent.jsonl: No such file"),
        ("data.csv", "prompt,answer\n", "is no data file"),
        ("data.json", "[]", "is no data file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=match) as caught:
        load_task(str(tmp_path / name), verifier="exact")
    assert caught.value.exit_code == 2


def test_a_folder_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        load_task(str(tmp_path / "d.jsonl"), verifier="exact")


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"})
    with pytest.raises(UsageError, match="all 1 prompts are held out"):
        load_task(path, verifier="exact", held_out=1.0)


def test_the_split_is_by_prompt_and_stays_when_lines_are_added(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rows = [{"prompt": f"{seed}-{i % 700}", "answer": str(i)} for i in range(1000)]
    task = load_task(write(tmp_path / "d.jsonl", *rows), verifier="exact")
    held_out = task.held_out(1000)
    assert task.size is not None
    assert task.size + len(held_out) == 1000
    assert 50 < len(held_out) < 150
    train = {task.sample(i).prompt for i in range(task.size)}
    assert not train & {s.prompt for s in held_out}
    assert [s.index for s in held_out] == list(range(len(held_out)))
    assert [task.sample(i).index for i in range(task.size)] == list(range(task.size))
    assert task.held_out(5) == held_out[:5]

    longer = load_task(write(tmp_path / "e.jsonl", *rows, {"prompt": "new", "answer": "1"}), verifier="exact")
    old = {s.prompt for s in longer.held_out(1001)} - {"new"}
    assert old == {s.prompt for s in held_out}
    assert longer.digest != task.digest


def test_prompts_reach_a_run_through_the_cursor_once_an_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(100)]
    task = load_task(write(tmp_path / "d.jsonl", *rows), verifier="exact")
    taken = [s.prompt for _, s in PromptCursor(task, 1, epochs=1).take(1000)]
    assert len(taken) == len(set(taken)) == task.size


def scored(tmp_path: Path, verifier: str, answer: str, response: str) -> float:
    task: Task = load_task(
        write(tmp_path / "d.jsonl", {"prompt": "p", "answer": answer}), verifier=verifier, held_out=0.0
    )
    return task.score(task.sample(0), response)


@pytest.mark.parametrize(
    ("verifier", "answer", "response", "reward"),
    [
        ("exact", "42", " 42\n", 1),
        ("exact", "42", "<think>6*7</think>\n42", 1),
        ("exact", "42", "42.", 0),
        ("contains", "Paris", "It is Paris.", 1),
        ("contains", "Paris", "<think>Paris?</think>It is Rome.", 0),
        ("numeric", "1000", "about 1,000 apples", 1),
        ("numeric", "the answer is 0.5", "1/2 = .5", 1),
        ("numeric", "-3", "minus: -3", 1),
        ("numeric", "3", "3 or 4", 0),
        ("numeric", "3", "three", 0),
        ("numeric", "2e3", "2000.0", 1),
        ("numeric", "1e999", "1e999", 1),
        ("regex", r"^\d{4}$", "2024", 1),
        ("regex", r"^\d{4}$", "in 2024", 0),
    ],
)
def test_builtin_verifiers(tmp_path: Path, verifier: str, answer: str, response: str, reward: float) -> None:
    assert scored(tmp_path, verifier, answer, response) == reward


@pytest.mark.parametrize(
    ("verifier", "match"),
    [
        (None, "a data file needs a verifier"),
        ("exakt", "did you mean 'exact'"),
        ("module:", "does not name a function"),
        (":function", "does not name a function"),
        ("no/such/file.py:reward", "there is no file no/such/file.py"),
    ],
)
def test_verifiers_that_cannot_be(tmp_path: Path, verifier: str | None, match: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"})
    with pytest.raises(UsageError) as caught:
        load_task(path, verifier=verifier)
    assert match in str(caught.value)


def test_a_misspelt_task_gets_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        load_task("cylce")
    assert "did you mean 'cycle'" in str(caught.value)


@pytest.mark.parametrize("option", [{"verifier": "exact"}, {"prompt_field": "q"}, {"held_out": 0.5}])
def test_options_that_a_task_has_no_use_for_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"task 'cycle' does not use task.{next(iter(option))}"):
        load_task("cycle", **option)
