"""The loop on the rollout side: submits prompts, lets the engine decode, scores what finishes, fills the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlctl.errors import RlctlError
from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Dispatched, Finished, GroupEnded, SegmentMade
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, RolloutEngine, SamplingParams
from rlctl.rollout.conversations import Conversations
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.chat import Chat
from rlctl.tasks.prompts import AUTO, encode_prompt
from rlctl.tasks.rewarding import Scorer


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


@dataclass
class RolloutStats:
    """Work since the last ``take_stats``. Of failed rewards, by reason, how many and the place of the first prompt."""

    tokens: int = 0
    seconds: float = 0.0
    score_seconds: float = 0.0
    responses: int = 0
    failed_rewards: dict[str, int] = field(default_factory=dict)
    first_failed: dict[str, str] = field(default_factory=dict)


class Rollouter:
    """Feeds one rollout engine.

    Args:
        engine: where responses are made.
        task: prompts and answers.
        scorer: gives rewards, each within a deadline.
        tokenizer: a transformers tokenizer.
        buffer: where groups wait.
        events: where everything is told.
        params: sampling of training rollouts.
        samples: responses of one prompt.
        seed: the run's seed.
        max_prompt_tokens: longest prompt.
        truncate_prompts: cut the head off longer ones; else they are an error.
        chat: how prompts and observations are put to the model.
        max_turns: most turns of a conversation; None: as many as there is room for.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        task: Task,
        scorer: Scorer,
        tokenizer: Any,
        buffer: GroupBuffer,
        events: EventLog,
        *,
        params: SamplingParams,
        samples: int,
        seed: int,
        max_prompt_tokens: int,
        truncate_prompts: bool = False,
        chat: Chat = AUTO,
        max_turns: int | None = None,
    ) -> None:
        self._engine = engine
        self._task = task
        self._conversations = Conversations(tokenizer, scorer, chat, max_turns)
        self._buffer = buffer
        self._events = events
        self._params = params
        self._samples = samples
        self._seed = seed
        self._encode = partial(
            encode_prompt, tokenizer, max_prompt_tokens=max_prompt_tokens, truncate=truncate_prompts, chat=chat
        )
        self._stats = RolloutStats()

    def submit(self, prompts: Sequence[tuple[int, Sample]], version: int) -> None:
        """Admit prompts to the buffer and queue their requests."""
        for ordinal, sample in prompts:
            prompt_ids = self._encode(sample)
            group = PromptGroup(
                ordinal, sample.index, sample.group, prompt_ids, self._samples, version, task=sample.task
            )
            self._buffer.submit(group)
            self._events.emit(
                Dispatched(ordinal=ordinal, row=sample.index, samples=self._samples, version=version, task=sample.task)
            )
            self._queue(group)

    def resubmit(self) -> None:
        """Queue again what the buffer waits for, after a restart; finished responses are kept."""
        for group in self._buffer.unfinished():
            self._queue(group)

    def run(self, until: Callable[[], bool]) -> None:
        """Decode until ``until()`` holds. Raises RlctlError when nothing runs any more and it still does not."""
        while not until():
            if self._engine.num_running == 0:
                raise RlctlError(
                    "nothing is being generated, and the batch is not full",
                    fix="this is a fault in rlctl; the event log of the run shows which prompts are missing",
                )
            self._file(self._tick())

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Answer ``samples`` greedily. Nothing enters the buffer."""
        params = SamplingParams(
            max_new_tokens=self._params.max_new_tokens, temperature=0.0, stop_token_ids=self._params.stop_token_ids
        )
        prompts = [self._encode(sample) for sample in samples]
        answers: dict[int, Response | None] = dict.fromkeys(range(len(samples)))
        waiting = list(answers)
        while waiting:
            # Training ordinals count up from 0, so negative ones never meet them.
            outputs = self._engine.generate(
                [self._request(RequestKey(-1 - i, 0), prompts[i], answers[i], params) for i in waiting]
            )
            ended = [(samples[i], answers[i], output) for i, output in zip(waiting, outputs, strict=True)]
            answers |= zip(waiting, self._conversations.advance(ended, params), strict=True)
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

    def take(self, outputs: Sequence[Output]) -> None:
        """File outputs that an abort ended; those that go on are queued again where they stopped."""
        self._file(outputs)

    def take_stats(self) -> RolloutStats:
        """Return the work since the last call."""
        stats, self._stats = self._stats, RolloutStats()
        return stats

    def _queue(self, group: PromptGroup) -> None:
        missing = [sample for sample in range(group.size) if sample not in group.responses]
        keys = [RequestKey(group.ordinal, sample) for sample in missing]
        self._engine.submit(
            [self._request(key, group.prompt_ids, group.under_way.get(key.sample), self._params) for key in keys]
        )

    def _request(
        self, key: RequestKey, prompt_ids: Sequence[int], so_far: Response | None, params: SamplingParams
    ) -> Request:
        return self._conversations.request(key, prompt_ids, params, self._seed, so_far)

    def _tick(self) -> list[Output]:
        begin = time.perf_counter()
        outputs = self._engine.step()
        self._stats.seconds += time.perf_counter() - begin
        return outputs

    def _file(self, outputs: Sequence[Output]) -> None:
        if not outputs:
            return
        begin = time.perf_counter()
        groups = {o.key.ordinal: self._buffer.group_of(o.key.ordinal) for o in outputs}
        samples = {ordinal: self._task.sample(group.row) for ordinal, group in groups.items()}
        ended = [(samples[o.key.ordinal], groups[o.key.ordinal].under_way.get(o.key.sample), o) for o in outputs]
        responses = self._conversations.advance(ended, self._params)
        self._stats.score_seconds += time.perf_counter() - begin
        for (_, so_far, output), response in zip(ended, responses, strict=True):
            self._stats.tokens += response.sampled - (so_far.sampled if so_far is not None else 0)
            if response.failed:
                place = filter(None, [f"prompt {output.key.ordinal}", samples[output.key.ordinal].source])
                self._stats.first_failed.setdefault(response.failed, ", ".join(place))
            if response.finish_reason == "abort":
                group = self._buffer.goes_on(response)
                self._engine.submit([self._request(response.key, group.prompt_ids, response, self._params)])
            else:
                self._tell(response, self._buffer.complete(response))

    def _tell(self, response: Response, group: PromptGroup) -> None:
        ordinal, sample, _ = response.key
        for index, segment in enumerate(response.segments):
            self._events.emit(
                SegmentMade(
                    ordinal=ordinal,
                    sample=sample,
                    turn=segment.turn,
                    index=index,
                    tokens=len(segment.token_ids),
                    version=segment.version,
                    replica=segment.replica,
                    observation=segment.observation,
                )
            )
        self._stats.responses += 1
        if response.failed:
            self._stats.failed_rewards[response.failed] = self._stats.failed_rewards.get(response.failed, 0) + 1
        assert response.reward is not None
        self._events.emit(
            Finished(
                ordinal=ordinal,
                sample=sample,
                tokens=response.sampled,
                reason=response.finish_reason,
                reward=response.reward,
                failed=response.failed or "",
                turns=len(response.turns),
            )
        )
        if group.status == "finished":
            self._events.emit(GroupEnded(ordinal=ordinal, status="finished"))
