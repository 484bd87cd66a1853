"""Prompt groups: the n responses of one prompt, which are trained together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlctl.experience.segments import FinishReason, RequestKey, Segment

GroupStatus = Literal["pending", "running", "finished", "failed"]


@dataclass
class Response:
    """One finished or interrupted response.

    Attributes:
        key: which request it answers.
        segments: its tokens, in order.
        finish_reason: why it ended; "abort" means that it may be continued.
        reward: the verifier's number, None until scored.
        failed: why scoring failed, or None.
    """

    key: RequestKey
    segments: list[Segment]
    finish_reason: FinishReason
    reward: float | None = None
    failed: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """All sampled ids, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the sampled ids, one for each of ``token_ids``."""
        return [value for segment in self.segments for value in segment.logprobs]

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

    def add(self, response: Response) -> None:
        """Take a finished response; the last one finishes the group. Raises ValueError on one that does not belong."""
        ordinal, sample, _ = response.key
        if ordinal != self.ordinal or not 0 <= sample < self.size or sample in self.responses:
            raise ValueError(f"response {tuple(response.key)} does not belong to group {self.ordinal} of {self.size}")
        if response.finish_reason == "abort":
            raise ValueError(f"response {tuple(response.key)} was interrupted and is not finished")
        self.responses[sample] = response
        self.status = "finished" if len(self.responses) == self.size else "running"

    @property
    def ordered(self) -> list[Response]:
        """Responses by sample index."""
        return [self.responses[index] for index in sorted(self.responses)]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; the dispatch version when no token was made."""
        return min(
            (s.version for r in self.responses.values() for s in r.segments if s.token_ids), default=self.dispatched
        )
