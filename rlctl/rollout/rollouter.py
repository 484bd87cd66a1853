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
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.prompts import decode_response, encode_prompt
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
    ) -> None:
        self._engine = engine
        self._task = task
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._buffer = buffer
        self._events = events
        self._params = params
        self._samples = samples
        self._seed = seed
        self._encode = partial(encode_prompt, tokenizer, max_prompt_tokens=max_prompt_tokens, truncate=truncate_prompts)
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
        # Training ordinals count up from 0, so negative ones never meet them.
        requests = [
            Request(
                RequestKey(-1 - index, 0),
                tuple(self._encode(sample)),
                params,
                self._seed,
            )
            for index, sample in enumerate(samples)
        ]
        outputs = self._engine.generate(requests)
        pairs = [
            (s, decode_response(self._tokenizer, o.token_ids, self._params.stop_token_ids))
            for s, o in zip(samples, outputs, strict=True)
        ]
        scores = self._scorer.score(pairs)
        totals: dict[str, list[float]] = {}
        for sample, score in zip(samples, scores, strict=True):
            for label in dict.fromkeys((sample.task, f"{sample.task} {sample.group}" if sample.task else sample.group)):
                totals.setdefault(label, []).append(score.reward)
        return Evaluation(
            prompts=len(samples),
            accuracy=sum(score.reward for score in scores) / max(len(samples), 1),
            by_label={label: sum(values) / len(values) for label, values in totals.items() if label},
            tokens=sum(len(output.token_ids) for output in outputs) / max(len(samples), 1),
        )

    def take_stats(self) -> RolloutStats:
        """Return the work since the last call."""
        stats, self._stats = self._stats, RolloutStats()
        return stats

    def _queue(self, group: PromptGroup) -> None:
        missing = [sample for sample in range(group.size) if sample not in group.responses]
        prompt_ids = tuple(group.prompt_ids)
        self._engine.submit(
            [Request(RequestKey(group.ordinal, sample), prompt_ids, self._params, self._seed) for sample in missing]
        )

    def _tick(self) -> list[Output]:
        begin = time.perf_counter()
        outputs = self._engine.step()
        self._stats.seconds += time.perf_counter() - begin
        return outputs

    def _file(self, outputs: Sequence[Output]) -> None:
        if not outputs:
            return
        begin = time.perf_counter()
        rows = {o.key.ordinal: self._buffer.row_of(o.key.ordinal) for o in outputs}
        pairs = [
            (
                self._task.sample(rows[o.key.ordinal]),
                decode_response(self._tokenizer, o.token_ids, self._params.stop_token_ids),
            )
            for o in outputs
        ]
        scores = self._scorer.score(pairs)
        self._stats.score_seconds += time.perf_counter() - begin
        for (sample, _), output, score in zip(pairs, outputs, scores, strict=True):
            if score.failed:
                place = ", ".join(filter(None, [f"prompt {output.key.ordinal}", sample.source]))
                self._stats.first_failed.setdefault(score.failed, place)
            response = Response(output.key, output.segments, output.finish_reason, score.reward, score.failed)
            group = self._buffer.complete(response)
            self._tell(response, group)

    def _tell(self, response: Response, group: PromptGroup) -> None:
        ordinal, sample, turn = response.key
        for index, segment in enumerate(response.segments):
            self._events.emit(
                SegmentMade(
                    ordinal=ordinal,
                    sample=sample,
                    turn=turn,
                    index=index,
                    tokens=len(segment.token_ids),
                    version=segment.version,
                    replica=segment.replica,
                )
            )
        tokens = sum(len(segment.token_ids) for segment in response.segments)
        self._stats.tokens += tokens
        self._stats.responses += 1
        if response.failed:
            self._stats.failed_rewards[response.failed] = self._stats.failed_rewards.get(response.failed, 0) + 1
        assert response.reward is not None
        self._events.emit(
            Finished(
                ordinal=ordinal,
                sample=sample,
                tokens=tokens,
                reason=response.finish_reason,
                reward=response.reward,
                failed=response.failed or "",
            )
        )
        if group.status == "finished":
            self._events.emit(GroupEnded(ordinal=ordinal, status="finished"))
