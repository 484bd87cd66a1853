"""Tasks of several turns: the model speaks, the task answers, until the task says that it is done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from rlctl.errors import RlctlError
from rlctl.tasks.base import Message, Sample, Score, Task
from rlctl.tasks.outcome import Outcome, in_one_line, outcome_of
from rlctl.tasks.prompts import decode_response

Step = tuple[str | None, float, bool]
"""What a step returns: observation (None when done), reward, and whether the conversation is done."""
WANTED = "a tuple (observation: text, or None when done; reward: number; done: bool)"


class StepError(RlctlError):
    """A step returned something that is no step: a fault in the task, which no reward of 0 should hide."""


class ConversationTask(Task):
    """A task of several turns. The reward of a conversation is the sum of its steps' rewards."""

    @property
    def several_turns(self) -> bool:
        return True

    @abstractmethod
    def step(self, sample: Sample, messages: Sequence[Message]) -> Step:
        """Return (observation, reward, done) for what the model said last.

        It must depend on its arguments alone: a run that goes on after a stop asks again.

        Args:
            sample: the prompt.
            messages: the whole conversation with ``role`` and ``content``: the prompt, then in turn what the model
                said (``assistant``) and what it was told (``user``). The last one is the model's.

        Returns:
            observation: what the model is told next; None or anything when ``done``.
            reward: added to the conversation's.
            done: whether this was the last turn.
        """

    def score(self, sample: Sample, response_text: str) -> float:
        """Return the reward of a first turn."""
        return self.step(sample, [*opening(sample), {"role": "assistant", "content": response_text}])[1]


def opening(sample: Sample) -> list[Message]:
    """Return a prompt as a chat."""
    return list(sample.messages) if sample.messages else [{"role": "user", "content": sample.prompt}]


def said_in_turns(
    tokenizer: Any,
    ids: Sequence[int],
    turns: Sequence[tuple[int, int]],
    observations: Sequence[str],
    stop_ids: Sequence[int],
) -> list[Message]:
    """Return a response as a chat.

    Args:
        ids: of the whole response.
        turns: where each of the model's turns begins and ends in it.
        observations: what it was told between them.
        stop_ids: tokens that end a turn.
    """
    messages: list[Message] = []
    for turn, (begin, end) in enumerate(turns):
        if turn:
            messages.append({"role": "user", "content": observations[turn - 1]})
        messages.append({"role": "assistant", "content": decode_response(tokenizer, ids[begin:end], stop_ids)})
    return messages


def take_step(take: Callable[[], Any], who: str) -> Outcome:
    """Run ``take`` and check what it returns. A step that raises ends the conversation and counts as 0; one that
    returns something else than ``Step`` is ``wrong``, as ``who`` did it."""
    try:
        step = take()
    except Exception as error:  # noqa: BLE001 - other people's code may raise anything, and the run goes on
        return Outcome(failed=in_one_line(f"raised: {type(error).__name__}: {error}"))
    if not isinstance(step, tuple | list) or len(step) != 3:
        return _wrong(who, step, "")
    observation, reward, done = step
    if not isinstance(done, bool | np.bool_):
        return _wrong(who, step, f"done is {type(done).__name__}")
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        return _wrong(who, step, f"the reward is {type(reward).__name__}")
    if not done and not (isinstance(observation, str) and observation):
        return _wrong(who, step, f"it goes on, and the observation is {observation!r:.40}")
    outcome = outcome_of(lambda: reward)
    return outcome if done or outcome.failed else replace(outcome, observation=observation)


def score_of(outcome: Outcome, sample: Sample) -> Score:
    """Return a step as a score. Raises StepError for one that is wrong."""
    if outcome.wrong is not None:
        raise StepError(outcome.wrong, fix=f"return {WANTED}")
    return Score(sample.index, outcome.reward, outcome.failed, observation=outcome.observation)


def _wrong(who: str, step: object, why: str) -> Outcome:
    shown = in_one_line(f"{type(step).__name__} {step!r}", 120)
    return Outcome(wrong=f"the {who} returned {shown}{f': {why}' if why else ''}")
