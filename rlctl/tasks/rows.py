"""From a row of somebody's data to a prompt with its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlctl.tasks.answers import answer_fault
from rlctl.tasks.base import Message, Sample, TaskOptions
from rlctl.tasks.verifiers import NONE, VERIFIERS

MESSAGES = "messages"
"""Field that holds a chat, looked at where a row has no prompt."""


def sample_of(row: object, source: str, options: TaskOptions) -> Sample:
    """Return the sample in a row, index 0. A field ``a.b`` that the row does not have is field ``b`` of its ``a``.

    Raises:
        ValueError: the fault.
    """
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    prompt_field = options.prompt_field
    if prompt_field == TaskOptions().prompt_field and _field(row, prompt_field) is None and row.get(MESSAGES):
        prompt_field = MESSAGES
    fields = {name: _field(row, name) for name in (prompt_field, options.answer_field)}
    if options.verifier == NONE and fields[options.answer_field] is None:
        fields[options.answer_field] = ""
    if missing := [name for name, value in fields.items() if value is None]:
        wanted = ", ".join(map(repr, missing))
        has = ", ".join(repr(name) for name, value in row.items() if value is not None)
        raise ValueError(f"no {wanted} (the line has {has or ('only nulls' if row else 'no fields')})")
    prompt, messages = _prompt(fields[prompt_field], prompt_field)
    answer = fields[options.answer_field]
    text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
    if not text.strip() and options.verifier in VERIFIERS.names():
        raise ValueError(f"{options.answer_field!r} is empty")
    if fault := answer_fault(options.verifier, text):
        raise ValueError(fault)
    group = row.get("group")
    return Sample(0, prompt, text, "" if group is None else str(group), messages, source)


def identity(sample: Sample) -> str:
    """Return the text by whose hash a prompt is held out."""
    return sample.prompt if sample.messages is None else json.dumps(sample.messages, sort_keys=True)


def _field(row: Mapping[Any, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name)
    head, _, rest = name.partition(".")
    inner = row.get(head)
    return _field(inner, rest) if isinstance(inner, Mapping) else None


def _prompt(value: Any, field: str) -> tuple[str, list[Message] | None]:
    """Return the prompt as text and, if it is a chat, its messages."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{field!r} is empty")
        return value, None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field!r} is neither text nor a list of chat messages")
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"a message in {field!r} lacks 'role' and 'content' as text")
    if value[-1]["role"] == "assistant":
        raise ValueError(f"{field!r} ends with the assistant's message: the response would follow the answer")
    return value[-1]["content"], value
