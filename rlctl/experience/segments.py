"""A response is a list of segments: tokens made in one go, under one weight version, on one replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class RequestKey(NamedTuple):
    """Identity of one generation request; never random, so that a run can be told again.

    Attributes:
        ordinal: position of the prompt in the data stream, counted over the whole run.
        sample: index within the prompt group, 0 .. n-1.
        turn: index of the model's turn in a conversation.
    """

    ordinal: int
    sample: int
    turn: int = 0


@dataclass
class Segment:
    """Tokens of one response made under one weight version, or an observation of a conversation.

    Attributes:
        token_ids: sampled ids, in order; of an observation, what the task said.
        logprobs: natural log of the probability of each sampled id, same length, under the temperature-scaled
            distribution before any top-p or top-k cut. An observation was not drawn and has none.
        version: weight version that made them; of an observation, that of the segment before it.
        replica: name of the rollout replica; of an observation, that of the segment before it.
        turn: the model's turn that the tokens are part of, or that an observation follows.
        observation: whether the task said it, not the model. Nothing is learnt from it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    replica: str = "0"
    turn: int = 0
    observation: bool = False

    def __post_init__(self) -> None:
        if self.observation and self.logprobs:
            raise ValueError(f"an observation with {len(self.logprobs)} log-probs: it was not drawn")
        if not self.observation and len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
