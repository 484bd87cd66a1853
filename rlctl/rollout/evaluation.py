"""Greedy answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlctl.experience.groups import Response
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.tasks.base import Sample


@dataclass
class Evaluation:
    """Greedy answers to held-out prompts.

    Attributes:
        prompts: how many.
        accuracy: mean reward.
        by_label: mean reward of each kind of prompt.
        tokens: mean response length.
    """

    prompts: int
    accuracy: float
    by_label: dict[str, float]
    tokens: float


class Generates(Protocol):
    """What answers requests and returns when all are answered."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the outputs of ``requests``, in their order."""


def evaluate(
    engine: Generates,
    conversations: Conversations,
    encode: Callable[[Sample], list[int]],
    samples: Sequence[Sample],
    params: SamplingParams,
    seed: int,
) -> Evaluation:
    """Answer ``samples`` greedily, whole conversations. ``params`` are those of training."""
    params = replace(params, temperature=0.0, top_p=1.0, top_k=0)
    prompts = [encode(sample) for sample in samples]
    answers: dict[int, Response | None] = dict.fromkeys(range(len(samples)))
    waiting = list(answers)
    while waiting:
        # Training ordinals count up from 0, so negative ones never meet them.
        requests = [conversations.request(RequestKey(-1 - i, 0), prompts[i], params, seed, answers[i]) for i in waiting]
        ended = [(samples[i], answers[i], output) for i, output in zip(waiting, engine.generate(requests), strict=True)]
        answers |= zip(waiting, conversations.advance(ended, params), strict=True)
        waiting = [i for i, answer in answers.items() if answer is not None and answer.finish_reason == "abort"]
    found = [answer for answer in answers.values() if answer is not None]
    rewards = [answer.reward or 0.0 for answer in found]
    totals: dict[str, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        for label in dict.fromkeys((sample.task, f"{sample.task} {sample.group}" if sample.task else sample.group)):
            totals.setdefault(label, []).append(reward)
    return Evaluation(
        prompts=len(samples),
        accuracy=sum(rewards) / max(len(samples), 1),
        by_label={label: sum(values) / len(values) for label, values in totals.items() if label},
        tokens=sum(answer.sampled for answer in found) / max(len(samples), 1),
    )
