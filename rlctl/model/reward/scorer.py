"""Responses of a train batch in, scores out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlctl.errors import RlctlError
from rlctl.experience.rows import Floats, Row
from rlctl.model.reward.base import RewardModel
from rlctl.model.reward.reading import Reader


@dataclass(frozen=True)
class ResponseScorer:
    """A reward model with the reader that knows what it is to be given."""

    model: RewardModel
    reader: Reader

    def scores(self, rows: Sequence[Row], index_of: Mapping[int, int]) -> tuple[Floats, int]:
        """Return the score of each row, float32, and how many sequences were cut to what the model takes.

        Args:
            rows: of a train batch.
            index_of: the number, in the task's data, of each row's group.

        Raises:
            RlctlError: a score that is not a finite number.
        """
        sequences, cut = self.reader.read(rows, index_of)
        scores = self.model.scores(sequences)
        if not np.isfinite(scores).all():
            at = int(np.flatnonzero(~np.isfinite(scores))[0])
            row = rows[at]
            raise RlctlError(
                f"the reward model's score of prompt {row.group}, sample {row.key.sample} is {scores[at]}",
                where="reward_model.path",
                fix="its weights or reward_model.dtype do not suit it: try float32, or another model",
            )
        return scores, cut

    def close(self) -> None:
        """End the model's processes, if it has some."""
        self.model.close()
