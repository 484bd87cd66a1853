"""From a prompt to token ids, and from a response's ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from rlctl.errors import Finding, FindingsError, UsageError
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.chat import Chat, plain_prompt

AUTO = Chat()
_SHOWN = 20


def encode_prompt(
    tokenizer: Any, sample: Sample, max_prompt_tokens: int, *, truncate: bool = False, chat: Chat = AUTO
) -> list[int]:
    """Return the ids that a response continues, at most ``max_prompt_tokens``.

    With ``truncate`` the end of a longer prompt, which is what a response continues; a chat loses its head.

    Raises:
        UsageError: longer than ``max_prompt_tokens``, empty, or a chat that no template is there for.
    """
    ids = prompt_ids(tokenizer, sample, chat)
    if len(ids) > max_prompt_tokens and not truncate:
        raise UsageError(
            f"the prompt has {len(ids)} tokens, over task.max_prompt_tokens={max_prompt_tokens}",
            where=_place(sample),
            fix="raise task.max_prompt_tokens, shorten or remove the prompt, or set task.overlong_prompts",
        )
    return ids[-max_prompt_tokens:]


def prompt_ids(tokenizer: Any, sample: Sample, chat: Chat = AUTO) -> list[int]:
    """Return all ids of a prompt: the chat template's where ``chat`` takes it, else those of the plain text with
    whatever the tokenizer puts before it. Raises UsageError for an empty one, or a chat without a template."""
    where = _place(sample)
    if sample.token_ids is not None:
        return list(sample.token_ids)
    if chat.templated(tokenizer):
        text = chat.render(tokenizer, sample.messages or [{"role": "user", "content": sample.prompt}])
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    else:
        ids = list(tokenizer.encode(plain_prompt(tokenizer, chat, sample, where)))
        while ids and ids[-1] == tokenizer.eos_token_id:
            # Some tokenizers end every text; a response cannot follow an end.
            ids.pop()
    if not ids:
        raise UsageError("the prompt has no tokens", where=where, fix="remove it from the data")
    return ids


def _place(sample: Sample) -> str:
    return sample.source or f"prompt {sample.index}"


def check_prompts(
    task: Task,
    tokenizer: Any,
    max_prompt_tokens: int,
    held_out: Sequence[Sample],
    *,
    truncate: bool = False,
    chat: Chat = AUTO,
) -> int:
    """Encode every prompt of a finite task and the held-out ones, so that none ends a run halfway.

    Returns:
        How many are longer than ``max_prompt_tokens`` (with ``truncate``; else they are faults).

    Raises:
        FindingsError: all prompts that cannot be used, each with its place.
    """
    findings, longer = [], 0
    for sample in chain(task.prompts(), held_out):
        try:
            longer += len(prompt_ids(tokenizer, sample, chat)) > max_prompt_tokens
            encode_prompt(tokenizer, sample, max_prompt_tokens, truncate=truncate, chat=chat)
        except UsageError as error:
            findings.append(Finding(error.message, error.where, error.fix))
    if findings:
        raise FindingsError("the prompts cannot be used", findings, limit=_SHOWN)
    return longer


def fits(tokenizer: Any, sample: Sample, max_prompt_tokens: int, chat: Chat = AUTO) -> bool:
    """Whether a prompt is short enough. Raises UsageError as ``prompt_ids`` does."""
    return len(prompt_ids(tokenizer, sample, chat)) <= max_prompt_tokens


def decode_response(tokenizer: Any, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
    """Return the text of a response without the end, padding and ``stop_ids`` after it. Special tokens inside stay:
    a verifier must see what the model wrote."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_ids}
    end = len(ids)
    while end and ids[end - 1] in ends:
        end -= 1
    text: str = tokenizer.decode(list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
