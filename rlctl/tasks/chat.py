"""How prompts and observations are put to a model: by its tokenizer's chat template, or as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.errors import UsageError
from rlctl.tasks.base import Message, Sample

_SAID = "rlctl-assistant-turn"
"""Stands for what the model said while a template is asked what comes after it."""


@dataclass(frozen=True)
class Chat:
    """Whether prompts go through the chat template.

    Attributes:
        use: ``auto``: when the tokenizer has one; ``template``: always; ``plain``: never.
        system: a system message before every prompt that has none; None for none.
    """

    use: Literal["auto", "template", "plain"] = "auto"
    system: str | None = None

    def require(self, tokenizer: Any, model: str) -> None:
        """Raise UsageError when ``tokenizer``, that of ``model``, lacks the template that the settings need."""
        if tokenizer.chat_template and self.use != "plain":
            return
        why = "task.chat is plain" if tokenizer.chat_template else f"the tokenizer of {model} has no chat template"
        if self.use == "template":
            raise UsageError(why, where="task.chat", fix="take an instruct model, or set task.chat=plain")
        if self.system is not None:
            raise UsageError(
                f"a system message needs a chat template, and {why}", where="task.system", fix="leave it out"
            )

    def templated(self, tokenizer: Any) -> bool:
        """Whether prompts of this tokenizer go through its template."""
        return self.use != "plain" and bool(tokenizer.chat_template)

    def render(self, tokenizer: Any, messages: Sequence[Message]) -> str:
        """Return a chat as the model sees it, up to where it is to speak. Raises UsageError when the template, which is
        a program, fails on it."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            text: str = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:
            # Whatever the model's author lets it raise, for a role that it does not know as a rule.
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UsageError(
                f"the model's chat template fails on a chat of {roles}: {error}",
                where="task.chat" if self.system is None else "task.system",
                fix="leave out task.system, mend the messages, or set task.chat=plain",
            ) from error
        return text


def observation_ids(tokenizer: Any, chat: Chat, text: str, stop_ids: Sequence[int]) -> list[int]:
    """Return the ids that follow what the model said when it is told ``text``.

    With a template: what the template puts after an assistant's message, up to where the model is to speak again,
    without the end of turn, which the model has said by itself. The model's own tokens are never encoded anew, so the
    template's view of earlier turns (some drop the thoughts in them) does not matter. Without one: the text's ids.

    Args:
        stop_ids: tokens that end a turn.

    Raises:
        UsageError: the template leaves out what the assistant said.
    """
    if chat.templated(tokenizer):
        turns = [("user", "."), ("assistant", _SAID), ("user", text)]
        whole = chat.render(tokenizer, [{"role": role, "content": content} for role, content in turns])
        _, said, text = whole.partition(_SAID)
        if not said:
            raise UsageError(
                "the chat template leaves out what the assistant said: a conversation cannot be told by it",
                where="task.chat",
                fix="take another model, or set task.chat=plain",
            )
        for stop in sorted((tokenizer.decode([token], skip_special_tokens=False) for token in stop_ids), key=len)[::-1]:
            if stop and text.startswith(stop):
                text = text.removeprefix(stop)
                break
    return list(tokenizer.encode(text, add_special_tokens=False))


def plain_prompt(tokenizer: Any, chat: Chat, sample: Sample, where: str) -> str:
    """Return a prompt's text for a model that sees no template. Raises UsageError for a chat."""
    if sample.messages is None:
        return sample.prompt
    if chat.use == "plain" and tokenizer.chat_template:
        raise UsageError("the prompt is a chat, and task.chat is plain", where=where, fix="set task.chat=auto")
    raise UsageError(
        "the prompt is a chat, but the model's tokenizer has no chat template",
        where=where,
        fix="use plain text prompts, or an instruct model",
    )
