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
        reward: the verifier's number, or what it makes together with ``score``.
        score: the reward model's; None without one.
        rollout_logprobs: as the rollout engine reported them; NaN for observations, which nobody drew.
        old_logprobs: of the policy at the start of the step; None when the update's own forward pass gives them.
        advantages: filled by the advantage stage.
        versions: weight version of each token.
        turns: begin and end of each of the model's turns within the response; between them lie observations. All of
            the response when not given.
        observations: what lies between the turns, as text.
        mask: bool, the tokens that are trained; those of ``turns`` when not given. Of an observation it is never set.
        ref_logprobs: of the reference model; None without one.
        values: the critic's, of the state before each token; None without one.
        returns: what the critic should have said; None without one.
        importance: rollout-correction weight of each token; None without weights.
        train_logprobs: of the policy that the update began with, as its own forward pass gave them; None before it.
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
    turns: list[tuple[int, int]] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    mask: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    importance: Floats | None = None
    train_logprobs: Floats | None = None
    score: float | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            self.turns = [(0, len(self.response_ids))]
        if not self.mask.size:
            self.mask = self.sampled

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool, the tokens that the model made."""
        sampled = np.zeros(len(self.response_ids), np.bool_)
        for begin, end in self.turns:
            sampled[begin:end] = True
        return sampled

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
            turns = response.turns
            check_aligned(ids, logprobs, name, turns)
            if response.reward is None:
                raise MisalignedError(f"{name} has no reward")
            rows.append(
                Row(
                    key=response.key,
                    group=group.ordinal,
                    prompt_ids=group.prompt_ids,
                    response_ids=ids,
                    reward=response.reward,
                    rollout_logprobs=np.asarray([np.nan if value is None else value for value in logprobs], np.float32),
                    versions=np.asarray(response.versions, np.int64),
                    turns=turns,
                    observations=response.observations,
                )
            )
    return sorted(rows, key=lambda row: row.key)


def check_aligned(
    token_ids: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    name: str,
    turns: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Raise MisalignedError unless there is one finite log-prob for each token id of ``turns`` (None: for all), and
    none for what lies between them."""
    if token_ids is None or len(token_ids) == 0:
        raise MisalignedError(
            f"{name} has no token ids", fix="text alone cannot be used: encoding it again need not give the same tokens"
        )
    count = len(logprobs) if logprobs is not None else 0
    if logprobs is None or count != len(token_ids):
        raise MisalignedError(f"{name} has {len(token_ids)} token ids but {count} log-probs")
    drawn = set(range(count)) if turns is None else {place for begin, end in turns for place in range(begin, end)}
    for position, value in enumerate(logprobs):
        what = f"at token {position} of {len(token_ids)}"
        if position in drawn and (value is None or not np.isfinite(value)):
            raise MisalignedError(f"{name} has no finite log-prob {what} ({value})")
        if position not in drawn and value is not None:
            raise MisalignedError(f"{name} has a log-prob {what} ({value}), an observation that nobody drew")
