"""The chat template by choice: used, demanded, left out; a system message."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlctl.errors import FindingsError, UsageError
from rlctl.tasks.base import Sample
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.chat import Chat
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.prompts import prompt_ids
from tests.trainers.sessions import Run

SHOUT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def text_of(chat: Chat, sample: Sample, template: str | None = SHOUT) -> str:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    chat.require(tokenizer, "some/model")
    text: str = tokenizer.decode(prompt_ids(tokenizer, sample, chat))
    return text


def test_prompts_go_through_the_template_or_not() -> None:
    sample = Sample(0, "6", "")
    talk = Sample(0, "7", "", messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "7"}])
    assert text_of(Chat(), sample) == text_of(Chat("template"), sample) == "[user]6[assistant]"
    assert text_of(Chat("plain"), sample) == text_of(Chat(), sample, None) == "6"
    assert text_of(Chat(system="be brief"), sample) == "[system]be brief[user]6[assistant]"
    # A chat that begins with a system message keeps its own.
    assert text_of(Chat(system="be brief"), talk) == "[system]S[user]7[assistant]"


def test_what_needs_a_template_is_refused_by_name_without_one() -> None:
    sample = Sample(0, "6", "", source="d.jsonl:3")
    talk = Sample(0, "7", "", messages=[{"role": "user", "content": "7"}], source="d.jsonl:4")
    with pytest.raises(UsageError, match=r"task\.chat: the tokenizer of some/model has no chat template"):
        text_of(Chat("template"), sample, None)
    with pytest.raises(UsageError, match=r"task\.system: .*the tokenizer of some/model has no chat template"):
        text_of(Chat(system="s"), sample, None)
    with pytest.raises(UsageError, match=r"task\.system: .*task\.chat is plain"):
        text_of(Chat("plain", "s"), sample)
    with pytest.raises(UsageError, match=r"d\.jsonl:4: the prompt is a chat, and task\.chat is plain"):
        text_of(Chat("plain"), talk)


def test_a_template_that_fails_on_a_chat_is_told() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}."
    assert text_of(Chat(), Sample(0, "6", ""), template) == "."
    with pytest.raises(UsageError, match=r"task\.system: .*fails on a chat of system, user: no system role here"):
        text_of(Chat(system="s"), Sample(0, "6", ""), template)


def model_with(template: str | None, folder: Path) -> None:
    """Save the built-in model with another chat template."""
    built_in = builtin_model_path("cycle-tiny")
    assert built_in is not None
    for file in built_in.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def test_a_template_that_cannot_tell_a_conversation_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model_with("{{ messages[-1]['content'] }}", tmp_path)
    mixture = "task.mixture=[{name: cycle}, {name: two_turn}]"
    for task in ("task.name=two_turn", mixture):
        with pytest.raises(UsageError, match="leaves out what the assistant said"):
            Run(tmp_path, f"model.path={tmp_path}", task)
    assert Run(tmp_path, f"model.path={tmp_path}", task, "task.chat=plain", steps=1).metrics


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    model_with(None, tmp_path)
    assert not AutoTokenizer.from_pretrained(tmp_path).chat_template
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "6+1+1b"}], "answer": "8"}) + "\n")
    words = [f"model.path={tmp_path}", f"task.name={data}", "task.verifier=exact", "task.held_out=0"]
    with pytest.raises(UsageError, match="has no chat template"):
        Run(tmp_path, *words, "task.chat=template")
    with pytest.raises(FindingsError, match=r"d\.jsonl:1: the prompt is a chat, but the model's tokenizer has no chat"):
        Run(tmp_path, *words)
    run = Run(tmp_path, f"task.name={data}", "task.verifier=exact", "task.held_out=0", "task.chat=template", steps=1)
    assert len(run.metrics) == 1
