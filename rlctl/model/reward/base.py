"""What a reward model does for a trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rlctl.experience.rows import Floats


class RewardModel(ABC):
    """A frozen model that scores token sequences; equal calls give equal bits."""

    @abstractmethod
    def scores(self, sequences: Sequence[Sequence[int]]) -> Floats:
        """Return a score, float32, of each sequence of token ids, at least one id each."""

    def close(self) -> None:
        """End what scores, if it is a process of its own."""
