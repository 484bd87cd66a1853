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
    """Tokens of one response made under one weight version.

    Attributes:
        token_ids: sampled ids, in order.
        logprobs: natural log of the probability of each sampled id, same length, under the temperature-scaled
            distribution before any top-p or top-k cut.
        version: weight version that made them.
        replica: name of the rollout replica.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    replica: str = "0"

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
