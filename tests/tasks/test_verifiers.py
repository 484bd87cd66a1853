"""Built-in verifiers against hostile responses and answers, and the answers that are refused before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.tasks.json_schema import json_schema
from rlctl.tasks.registry import load_task
from rlctl.tasks.rewarding import RewardScorer
from rlctl.tasks.verifiers import VERIFIERS

SCHEMA = json.dumps(
    {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 3}}, "maxProperties": 2}
)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"n": 3}', 1), ('<think>{"n": 1}</think>\n {"n": 4} ', 1), ('```json\n{"n": 3}\n```', 1), ("```\n{}\n```", 0),
        ('{"n": 2}', 0), ('{"n": "3"}', 0), ('{"n": 3, "a": 1, "b": 2}', 0), ("{}", 0), ("", 0), ('so {"n": 3}', 0),
        ('{"n": NaN}', 0), ('{"n": Infinity}', 0), ('{"n": 1e999}', 0), ('{"n": %s}' % ("9" * 5000), 0),
        ("[" * 100_000, 0), ("[" * 100_000 + "]" * 100_000, 0), ('{"n": 3', 0), ("\ud800", 0), ('{"n":3}{"n":3}', 0),
    ],
)  # fmt: skip
def test_a_response_is_held_against_a_json_schema(response: str, reward: float) -> None:
    assert json_schema("", response, SCHEMA) == reward


def test_a_schema_that_follows_itself_or_the_network_ends_in_no_reward() -> None:
    assert json_schema("", "1", json.dumps({"$ref": "#"})) == 0.0
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema("", "1", json.dumps({"$ref": "https://example.invalid/schema.json"}))


@pytest.mark.parametrize(
    ("verifier", "answer", "response"),
    [("regex", "^(a+)+$", "a" * 40 + "b"), ("json_schema", json.dumps({"pattern": "^(a+)+$"}), f'"{"a" * 40}b"')],
)
def test_a_catastrophic_pattern_ends_with_its_process(
    tmp_path: Path, verifier: str, answer: str, response: str
) -> None:
    task = load_task(write(tmp_path / "d.jsonl", {"prompt": "p", "answer": answer}), verifier=verifier, held_out=0.0)
    right = "aaa" if verifier == "regex" else '"aaa"'
    with RewardScorer(task, 1.0) as scorer:
        scores = scorer.score([(task.sample(0), text) for text in (right, response, right)])
    assert [(s.reward, s.failed) for s in scores] == [(1.0, None), (0.0, "timeout"), (1.0, None)]


@pytest.mark.parametrize(
    ("verifier", "answer", "said"),
    [
        ("numeric", "1/0", "has no number"), ("numeric", "NaN", "has no number"),
        ("regex", "a{99999999999}", "is not a regular expression"), ("regex", "(" * 5000 + ")" * 5000, "is not a reg"),
        ("json_schema", "{", "is not a JSON schema: not JSON"), ("json_schema", "{}", "with rules in it"),
        ("json_schema", '{"type": "integr"}', "'integr' is not valid"),
        *[(name, blank, "'answer' is empty") for name in VERIFIERS.names() for blank in ("", " \t")],
    ],
)  # fmt: skip
def test_answers_that_nothing_can_be_judged_by_are_refused_with_their_line(
    tmp_path: Path, verifier: str, answer: str, said: str
) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": answer})
    with pytest.raises(FindingsError) as caught:
        load_task(path, verifier=verifier)
    assert caught.value.findings[0].where == f"{path}:1"
    assert said in caught.value.findings[0].message


def test_a_function_may_miss_some_answers_but_not_all(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def reward(prompt, response, answer):\n    return 1.0\n")
    own = f"{tmp_path / 'r.py'}:reward"
    empty = {"prompt": "p", "answer": " "}
    path = write(tmp_path / "d.jsonl", empty, empty)
    with pytest.raises(UsageError, match="all 2 answers") as caught:
        load_task(path, verifier=own, held_out=0.0)
    assert (caught.value.where, "task.answer_field" in str(caught.value)) == (f"{path}:1", True)
    assert load_task(write(tmp_path / "e.jsonl", empty, {"prompt": "q", "answer": 1}), verifier=own, held_out=0.0).size


def test_a_tolerance_is_for_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": "100"})
    task = load_task(path, verifier="numeric", tolerance=0.1, held_out=0.0)
    assert [task.score(task.sample(0), text) for text in ("109", "120")] == [1.0, 0.0]
    with pytest.raises(UsageError, match=r"does not use task\.tolerance"):
        load_task(path, verifier="exact", tolerance=0.1)


def test_a_field_inside_a_field_and_a_chat_under_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    path = write(tmp_path / "d.jsonl", {"messages": chat, "reward_model": {"truth": "4"}})
    task = load_task(path, verifier="exact", answer_field="reward_model.truth", held_out=0.0)
    assert (task.sample(0).prompt, task.sample(0).messages, task.sample(0).answer) == ("2 + 2", chat, "4")
    path = write(tmp_path / "e.jsonl", {"messages": [*chat, {"role": "assistant", "content": "4"}], "answer": "4"})
    with pytest.raises(FindingsError, match="1 fault"):
        load_task(path, verifier="exact")
