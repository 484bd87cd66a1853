"""Rows of a train batch: one response each, with everything that its loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlctl.errors import RlctlError
from rlctl.experience.groups import PromptGroup
from rlctl.experience.segments import RequestKey

Floats = npt.NDArray[np.float32]


class MisalignedError(RlctlError):
    """A trajectory whose log-probs do not belong to its tokens one to one."""


@dataclass
class Row:
    """One response of a train batch; arrays hold one float32 for each response token.

    Attributes:
        key: identity; batches are sorted by it.
        group: ordinal of the prompt; rows of one group share a baseline.
        reward: the verifier's number.
        rollout_logprobs: as the rollout engine reported them.
        old_logprobs: of the policy at the start of the step; None when the update's own forward pass gives them.
        advantages: filled by the advantage stage.
        versions: weight version of each token.
        mask: bool, the tokens that are trained; all when not given.
        ref_logprobs: of the reference model; None without one.
        values: the critic's, of the state before each token; None without one.
        returns: what the critic should have said; None without one.
        importance: rollout-correction weight of each token; None without weights.
    """

    key: RequestKey
    group: int
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float
    rollout_logprobs: Floats
    versions: npt.NDArray[np.int64]
    old_logprobs: Floats | None = None
    advantages: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    mask: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    importance: Floats | None = None

    def __post_init__(self) -> None:
        if not self.mask.size:
            self.mask = np.ones(len(self.response_ids), np.bool_)

    @property
    def trained(self) -> int:
        """Response tokens that are trained."""
        return int(self.mask.sum())

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


def rows_of(groups: Sequence[PromptGroup]) -> list[Row]:
    """Return the rows of whole groups, sorted by key.

    Raises:
        MisalignedError: a response without reward, or whose log-probs are short, missing or not finite. Nothing is
            ever filled in: a log-prob of 0 would claim a probability of 1.
    """
    rows = []
    for group in groups:
        for response in group.ordered:
            ids, logprobs = response.token_ids, response.logprobs
            name = f"prompt {group.ordinal}, sample {response.key.sample}"
            check_aligned(ids, logprobs, name)
            if response.reward is None:
                raise MisalignedError(f"{name} has no reward")
            rows.append(
                Row(
                    key=response.key,
                    group=group.ordinal,
                    prompt_ids=group.prompt_ids,
                    response_ids=ids,
                    reward=response.reward,
                    rollout_logprobs=np.asarray(logprobs, np.float32),
                    versions=np.asarray(response.versions, np.int64),
                )
            )
    return sorted(rows, key=lambda row: row.key)


def check_aligned(token_ids: Sequence[int] | None, logprobs: Sequence[float | None] | None, name: str) -> None:
    """Raise MisalignedError unless there is one finite log-prob for each token id."""
    if token_ids is None or len(token_ids) == 0:
        raise MisalignedError(
            f"{name} has no token ids", fix="text alone cannot be used: encoding it again need not give the same tokens"
        )
    count = len(logprobs) if logprobs is not None else 0
    if logprobs is None or count != len(token_ids):
        raise MisalignedError(f"{name} has {len(token_ids)} token ids but {count} log-probs")
    for position, value in enumerate(logprobs):
        if value is None or not np.isfinite(value):
            raise MisalignedError(f"{name} has no finite log-prob at token {position} of {len(token_ids)} ({value})")
