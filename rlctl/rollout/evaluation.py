"""Greedy answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rlctl.experience.groups import Response
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.rollout.feeding import Decodes
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


class Evaluator:
    """Answers held-out prompts greedily, whole conversations.

    Args:
        engine: where responses are made.
        conversations: judges turns.
        encode: a prompt's token ids.
        params: sampling of training rollouts.
        seed: the run's.
    """

    def __init__(
        self,
        engine: Decodes,
        conversations: Conversations,
        encode: Callable[[Sample], list[int]],
        params: SamplingParams,
        seed: int,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._encode = encode
        self._params = replace(params, temperature=0.0, top_p=1.0, top_k=0)
        self._seed = seed
        self._thread: ThreadPoolExecutor | None = None

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Answer ``samples``."""
        prompts = [self._encode(sample) for sample in samples]
        answers: dict[int, Response | None] = dict.fromkeys(range(len(samples)))
        waiting = list(answers)
        while waiting:
            # Training ordinals count up from 0, so negative ones never meet them.
            requests = [
                self._conversations.request(RequestKey(-1 - i, 0), prompts[i], self._params, self._seed, answers[i])
                for i in waiting
            ]
            outputs = self._engine.generate(requests)
            ended = [(samples[i], answers[i], output) for i, output in zip(waiting, outputs, strict=True)]
            answers |= zip(waiting, self._conversations.advance(ended, self._params), strict=True)
            waiting = [i for i, answer in answers.items() if answer is not None and answer.finish_reason == "abort"]
        return _summed(samples, [answer for answer in answers.values() if answer is not None])

    def beside(self, evaluate: Callable[[], Evaluation | None]) -> Future[Evaluation | None]:
        """Have ``evaluate`` called in a thread, one at a time."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "validation")
        return self._thread.submit(evaluate)

    def close(self) -> None:
        """Begin nothing more in the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


def _summed(samples: Sequence[Sample], answers: Sequence[Response]) -> Evaluation:
    rewards = [answer.reward or 0.0 for answer in answers]
    totals: dict[str, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        for label in dict.fromkeys((sample.task, f"{sample.task} {sample.group}" if sample.task else sample.group)):
            totals.setdefault(label, []).append(reward)
    return Evaluation(
        prompts=len(samples),
        accuracy=sum(rewards) / max(len(samples), 1),
        by_label={label: sum(values) / len(values) for label, values in totals.items() if label},
        tokens=sum(answer.sampled for answer in answers) / max(len(samples), 1),
    )
