"""The reward model in this process, on the trainer's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlctl.experience.rows import Floats
from rlctl.model.micro_batches import partition
from rlctl.model.reward.base import RewardModel
from rlctl.model.reward.passes import Classifier


class LocalRewardModel(RewardModel):
    """On the device while it scores, and in host memory otherwise.

    Args:
        model: a frozen transformers sequence classifier.
        output: which output is the score; the only one when None.
        micro_batch_tokens: most tokens of one pass, padding counted.
        device: where it computes.
    """

    def __init__(
        self, model: Any, *, output: int | None, micro_batch_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self._classifier = Classifier(model, output=output, device=device)
        self._budget = micro_batch_tokens
        self._device = device

    def scores(self, sequences: Sequence[Sequence[int]]) -> Floats:
        result = np.zeros(len(sequences), np.float32)
        self._classifier.model.to(self._device)
        for indices in partition([len(ids) for ids in sequences], self._budget):
            result[indices] = self._classifier.scores([sequences[i] for i in indices])
        self._classifier.model.to("cpu")
        return result
