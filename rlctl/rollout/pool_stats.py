"""Figures of a pool of replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """Where the requests are, and what happened to them since the pool was made.

    Attributes:
        requests: in flight, by replica.
        tokens: of the prompts and prefixes of those, by replica.
        waiting: requests that no replica has.
        resubmitted: requests that were sent again because their replica was lost.
        tokens_kept: tokens that lost replicas were known to have made; others went on after them.
        tokens_read_again: tokens of prompts and responses that another replica had to read because of that.
        late_outputs: outputs that came when their requests had gone on elsewhere; they are not used.
        stickiness_breaks: conversations that went elsewhere because their replica was not there.
    """

    requests: dict[str, int]
    tokens: dict[str, int]
    waiting: int
    resubmitted: int
    tokens_kept: int
    tokens_read_again: int
    late_outputs: int
    stickiness_breaks: int
