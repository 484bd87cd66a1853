"""What becomes of an output: its tokens are kept at once, then it is judged and filed under its group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rlctl.experience.buffer import GroupBuffer
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Aborted, Evicted, Finished, GroupEnded, SegmentMade
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.schedule_events import Arrived
from rlctl.experience.standing import oldest_of
from rlctl.rollout.base import Output, SamplingParams
from rlctl.rollout.conversations import Conversations, with_turn
from rlctl.tasks.base import Sample, Task


@dataclass
class RolloutStats:
    """Work since the last ``take_stats``. Of failed rewards, by reason, how many and the place of the first prompt.

    Attributes:
        tokens: made, those that were lost again included.
        aborted: requests that were interrupted.
        kept_tokens, lost_tokens: of those, what goes on and what is made again.
    """

    tokens: int = 0
    seconds: float = 0.0
    score_seconds: float = 0.0
    responses: int = 0
    aborted: int = 0
    kept_tokens: int = 0
    lost_tokens: int = 0
    failed_rewards: dict[str, int] = field(default_factory=dict)
    first_failed: dict[str, str] = field(default_factory=dict)


class Filing:
    """Files outputs, in the order in which they came. All it holds are outputs that wait to be judged; their tokens are
    in the buffer already, so that a buffer saved at any moment has every token that was handed over.

    Args:
        task: prompts and answers.
        conversations: judges turns.
        buffer: where groups wait.
        events: where everything is told.
        params: sampling of training rollouts.
        partial: keep the tokens of responses that new weights interrupt; else those begin again from their prompt.
        again: called holding ``buffer.changed`` with a group and the index of a response of it that goes on.
        version: of the weights that generate.
    """

    def __init__(
        self,
        task: Task,
        conversations: Conversations,
        buffer: GroupBuffer,
        events: EventLog,
        params: SamplingParams,
        *,
        partial: bool,
        again: Callable[[PromptGroup, int], None],
        version: Callable[[], int],
    ) -> None:
        self._task = task
        self._conversations = conversations
        self._buffer = buffer
        self._events = events
        self._params = params
        self._partial = partial
        self._again = again
        self._version = version
        self._waiting: deque[tuple[Sample, Output]] = deque()
        self._judging = 0
        self.stats = RolloutStats()

    @property
    def waiting(self) -> int:
        """Outputs that are not judged yet."""
        return len(self._waiting) + self._judging

    def take_stats(self) -> RolloutStats:
        """Return the work since the last call."""
        stats, self.stats = self.stats, RolloutStats()
        return stats

    def arrived(self, outputs: Sequence[Output], why: str, *, keep: bool = False) -> None:
        """Keep the tokens of outputs.

        Args:
            outputs: as they came.
            why: what interrupted those that were.
            keep: those go on in any case: what interrupted them changes no weights.
        """
        with self._buffer.changed:
            interrupted, news = [], Arrived(keys=[], oldest=[])
            samples: dict[int, Sample] = {}
            for output in outputs:
                group = self._buffer.group_of(output.key.ordinal)
                so_far = group.under_way.get(output.key.sample)
                response = with_turn(so_far, output)
                self.stats.tokens += response.sampled - (so_far.sampled if so_far is not None else 0)
                self._buffer.goes_on(replace(response, finish_reason="abort"))
                news.keys.append(output.key)
                news.oldest.append(oldest_of(response))
                if output.finish_reason == "abort":
                    interrupted.append(response)
                    continue
                if group.ordinal not in samples:
                    samples[group.ordinal] = self._task.sample(group.row)
                self._waiting.append((samples[group.ordinal], output))
            if outputs:
                self._events.emit(news)
            if interrupted:
                self._interrupted(interrupted, why, keep or self._partial)

    def _interrupted(self, responses: Sequence[Response], why: str, keep: bool) -> None:
        tokens = sum(response.sampled for response in responses)
        kept, lost = (tokens, 0) if keep else (0, tokens)
        keys = [(r.key.ordinal, r.key.sample, r.key.turn) for r in responses]
        self._events.emit(Aborted(keys=keys, why=why, kept=kept, lost=lost))
        self.stats.aborted += len(responses)
        self.stats.kept_tokens += kept
        self.stats.lost_tokens += lost
        for response in responses:
            ordinal, sample, _ = response.key
            group = self._buffer.group_of(ordinal) if keep else self._buffer.starts_again(ordinal, sample)
            self._again(group, sample)

    def judge(self, most: int) -> None:
        """Judge up to ``most`` of the outputs that wait, and file what they have become."""
        begin = time.perf_counter()
        with self._buffer.changed:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._judging += len(taken)
            ended = [
                (sample, self._buffer.group_of(o.key.ordinal).under_way.get(o.key.sample), o) for sample, o in taken
            ]
        responses = self._conversations.advance(ended, self._params)
        with self._buffer.changed:
            self._judging -= len(taken)
            self.stats.score_seconds += time.perf_counter() - begin
            for (sample, _, output), response in zip(ended, responses, strict=True):
                self._file(sample, output, response)

    def _file(self, sample: Sample, output: Output, response: Response) -> None:
        if response.failed:
            place = filter(None, [f"prompt {output.key.ordinal}", sample.source])
            self.stats.first_failed.setdefault(response.failed, ", ".join(place))
        if response.finish_reason == "abort":
            self._again(self._buffer.goes_on(response), response.key.sample)
            return
        self._tell(response)
        if self._buffer.complete(response).status == "finished":
            self._events.emit(GroupEnded(ordinal=response.key.ordinal, status="finished"))
            self.expire(self._version())

    def expire(self, version: int) -> None:
        """Evict the finished groups that are too old for the weights of ``version``."""
        with self._buffer.changed:
            for ordinal, age in self._buffer.expire(version):
                self._events.emit(Evicted(ordinal=ordinal, why="stale", age=age))

    def _tell(self, response: Response) -> None:
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
        self.stats.responses += 1
        if response.failed:
            self.stats.failed_rewards[response.failed] = self.stats.failed_rewards.get(response.failed, 0) + 1
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
