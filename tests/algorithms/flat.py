"""Random flat batches and their padded twins, for references that work on (rows, longest) tables."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rlctl.algorithms.advantages import RewardedBatch
from rlctl.algorithms.losses import Tokens
from rlctl.algorithms.shaping import token_rewards


def seeded() -> int:
    """Print a new seed and set every generator to it."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
    return seed


@dataclass
class Padded:
    """The same tokens as a table; ``mask`` tells which cells are tokens."""

    mask: torch.Tensor

    @property
    def row(self) -> torch.Tensor:
        return self.mask.nonzero()[:, 0]

    def table(self, flat: torch.Tensor) -> torch.Tensor:
        """Return flat values as a table with zeros in the empty cells."""
        table = torch.zeros(self.mask.shape, dtype=flat.dtype)
        table[self.mask] = flat
        return table


def layout(rows: int = 9, longest: int = 12) -> Padded:
    lengths = torch.randint(1, longest + 1, (rows,))
    return Padded(torch.arange(longest)[None, :] < lengths[:, None])


def rewarded(
    rewards: list[float] | torch.Tensor, groups: list[int] | torch.Tensor, lengths: list[int] | None = None
) -> RewardedBatch:
    """Return a batch whose responses have the given rewards and lengths (1 when not given), all trained."""
    scores, count = torch.as_tensor(rewards, dtype=torch.float64), len(rewards)
    row = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths or [1] * count))
    return RewardedBatch(
        token_rewards(scores, row), torch.as_tensor(groups), row, torch.ones_like(row, dtype=torch.bool)
    )


def random_tokens(padded: Padded, weights: torch.Tensor, *, spread: float = 0.5, dtype=torch.float32) -> Tokens:
    """Return tokens with random log-probs; ``weights`` is the share of one token of each row."""
    row = padded.row
    logprobs = -torch.rand(row.numel(), dtype=dtype) * 3
    return Tokens(
        logprobs=logprobs.clone().requires_grad_(True),
        old_logprobs=logprobs + spread * torch.randn(row.numel(), dtype=dtype),
        advantages=torch.randn(int(row.max()) + 1, dtype=dtype)[row],
        weights=weights.to(dtype)[row],
        row=row,
        ref_logprobs=logprobs + spread * torch.randn(row.numel(), dtype=dtype),
        entropy=torch.rand(row.numel(), dtype=dtype).requires_grad_(True),
    )
