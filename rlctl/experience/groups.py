"""Prompt groups: the n responses of one prompt, which are trained together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlctl.experience.segments import FinishReason, RequestKey, Segment

GroupStatus = Literal["pending", "running", "finished", "failed"]


@dataclass
class Response:
    """One finished or interrupted response: of a conversation, all turns and the observations between them.

    Attributes:
        key: which request it answers; of a conversation, its last one, or the one that is under way.
        segments: its tokens, in order.
        finish_reason: why it ended; "abort" means that it may be continued.
        reward: the verifier's number, None until scored; of a conversation, the sum over its turns so far.
        failed: why scoring failed, or None.
        observations: what the task said after each turn but the last, as text.
    """

    key: RequestKey
    segments: list[Segment]
    finish_reason: FinishReason
    reward: float | None = None
    failed: str | None = None
    observations: list[str] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """All ids, those of observations included, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probs, one for each of ``token_ids``; None for those of observations."""
        values: list[float | None] = []
        for segment in self.segments:
            values += [None] * len(segment.token_ids) if segment.observation else segment.logprobs
        return values

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where each of the model's turns begins and ends in ``token_ids``; observations lie between them."""
        spans: dict[int, tuple[int, int]] = {}
        end = 0
        for segment in self.segments:
            begin, end = end, end + len(segment.token_ids)
            if not segment.observation:
                spans[segment.turn] = (spans.get(segment.turn, (begin, end))[0], end)
        return list(spans.values())

    @property
    def sampled(self) -> int:
        """Tokens that the model made."""
        return sum(len(segment.token_ids) for segment in self.segments if not segment.observation)

    @property
    def versions(self) -> list[int]:
        """Weight version of each token."""
        return [segment.version for segment in self.segments for _ in segment.token_ids]


@dataclass
class PromptGroup:
    """One prompt and its responses.

    Attributes:
        ordinal: position in the data stream.
        row: index of the prompt in the task's data.
        label: kind of prompt, for broken-down metrics.
        prompt_ids: token ids of the prompt.
        size: responses that make the group whole.
        dispatched: weight version when it was submitted.
        responses: by sample index.
        task: name of its task among those of a mixture, or "".
        under_way: responses that go on, by sample index: at the model's next turn, or in one that was interrupted.
    """

    ordinal: int
    row: int
    label: str
    prompt_ids: list[int]
    size: int
    dispatched: int
    status: GroupStatus = "pending"
    responses: dict[int, Response] = field(default_factory=dict)
    task: str = ""
    under_way: dict[int, Response] = field(default_factory=dict)

    def add(self, response: Response) -> None:
        """Take a finished response; the last one finishes the group. Raises ValueError on one that does not belong."""
        ordinal, sample, _ = response.key
        if ordinal != self.ordinal or not 0 <= sample < self.size or sample in self.responses:
            raise ValueError(f"response {tuple(response.key)} does not belong to group {self.ordinal} of {self.size}")
        if response.finish_reason == "abort":
            raise ValueError(f"response {tuple(response.key)} was interrupted and is not finished")
        self.under_way.pop(sample, None)
        self.responses[sample] = response
        self.status = "finished" if len(self.responses) == self.size else "running"

    def goes_on(self, response: Response) -> None:
        """Keep a response that goes on."""
        assert response.finish_reason == "abort" and response.key.sample not in self.responses
        self.under_way[response.key.sample] = response

    @property
    def finished(self) -> bool:
        """Whether all responses are there."""
        return self.status == "finished"

    @property
    def ordered(self) -> list[Response]:
        """Responses by sample index."""
        return [self.responses[index] for index in sorted(self.responses)]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; the dispatch version when no token was made."""
        return min(
            (
                s.version
                for r in (*self.responses.values(), *self.under_way.values())
                for s in r.segments
                if s.token_ids
            ),
            default=self.dispatched,
        )
