"""What a reward model reads of a response: the policy's tokens, a chat, or text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlctl.errors import UsageError
from rlctl.experience.rows import Row
from rlctl.schema.reward_model import RewardInput
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.conversation import opening, said_in_turns

WHERE = "reward_model.input"


class Reader:
    """Turns rows into the sequences that a reward model scores.

    Args:
        wanted: ``tokens``, ``chat``, ``text`` or ``auto``.
        own: the reward model's tokenizer; None where its folder has none.
        policy: the policy's tokenizer.
        stop_ids: tokens that end a response.
        embeds: tokens that the reward model has an embedding for.
        longest: most tokens that it takes; None for any number. Longer sequences keep their end.
        task: whose prompts are answered.
        system: a system message before every chat that has none.

    Raises:
        UsageError: what is wanted cannot be had from these tokenizers.
    """

    def __init__(
        self,
        wanted: RewardInput,
        *,
        own: Any | None,
        policy: Any,
        stop_ids: Sequence[int],
        embeds: int,
        longest: int | None,
        task: Task,
        system: str | None = None,
    ) -> None:
        self._own = own
        self._policy = policy
        self._stop_ids = stop_ids
        self._longest = longest
        self._task = task
        self._system = None if system is None else {"role": "system", "content": system}
        self.form = _form(wanted, own, policy, embeds)
        if self.form == "text" and any(sample.messages is not None for sample in _samples(task)):
            raise UsageError(
                "prompts are chats, and the reward model's tokenizer has no chat template",
                where=WHERE,
                fix="add a chat_template to its tokenizer, or use plain text prompts",
            )

    def read(self, rows: Sequence[Row], index_of: Mapping[int, int]) -> tuple[list[list[int]], int]:
        """Return the token ids of each row, and how many sequences were cut to their end.

        Args:
            rows: of a train batch.
            index_of: the number, in the task's data, of each row's group.
        """
        whole = [self._ids(row, index_of[row.group]) for row in rows]
        if self._longest is None:
            return whole, 0
        return [ids[-self._longest :] for ids in whole], sum(len(ids) > self._longest for ids in whole)

    def _ids(self, row: Row, index: int) -> list[int]:
        if self.form == "tokens":
            return [*row.prompt_ids, *row.response_ids]
        assert self._own is not None, "text is read by the reward model's tokenizer"
        sample = self._task.sample(index)
        said = said_in_turns(self._policy, row.response_ids, row.turns, row.observations, self._stop_ids)
        if self.form == "chat":
            asked = opening(sample)
            first = [] if self._system is None or asked[0]["role"] == "system" else [self._system]
            text = self._own.apply_chat_template([*first, *asked, *said], tokenize=False)
            return list(self._own.encode(text, add_special_tokens=False))
        ids = list(self._own.encode(sample.prompt + "".join(message["content"] for message in said)))
        end = self._own.eos_token_id
        ended = row.response_ids[-1] in self._stop_ids
        # As its training texts end, unless the response was cut.
        return [*ids, end] if ended and end is not None and ids[-1:] != [end] else ids


def _form(wanted: RewardInput, own: Any | None, policy: Any, embeds: int) -> RewardInput:
    same = own is not None and own.get_vocab() == policy.get_vocab()
    if wanted == "tokens" or (wanted == "auto" and same):
        if (own is not None and not same) or len(policy) > embeds:
            raise UsageError(
                "the reward model's vocabulary is not the policy's, so it cannot read the policy's tokens",
                where=WHERE,
                fix="set it to chat or text: responses are then encoded again by the reward model's tokenizer",
            )
        return "tokens"
    if own is None:
        raise UsageError(
            "the reward model's folder has no tokenizer",
            where="reward_model.path",
            fix="save its tokenizer into the folder; if it reads the policy's tokens, set reward_model.input=tokens",
        )
    if wanted == "auto":
        return "chat" if own.chat_template else "text"
    if wanted == "chat" and not own.chat_template:
        raise UsageError(
            "the reward model's tokenizer has no chat template",
            where=WHERE,
            fix="set it to text, or add a chat_template to the tokenizer",
        )
    return wanted


def _samples(task: Task) -> Iterator[Sample]:
    """Yield all prompts of finite tasks, and one of an endless task."""
    yield from task.prompts()
    if task.size is None:
        yield task.sample(0)
