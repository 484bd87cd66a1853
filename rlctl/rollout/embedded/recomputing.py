"""Any other causal LM, without a cache: every tick runs the whole sequences again.

Slow, but it asks nothing of a model but its forward: recurrent and hybrid architectures work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlctl.rollout.embedded.decoder import Prefix
from rlctl.rollout.embedded.transformers_model import TransformersDecoder


class RecomputingDecoder(TransformersDecoder):
    """A transformers model; a row is its token ids."""

    name = "recomputing"

    def allocate_cache(self) -> None:
        self._sequences: list[list[int]] = []
        self.lengths = np.zeros(0, dtype=np.int64)

    def free_cache(self) -> None:
        self.allocate_cache()

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
        return [Prefix(ids, row, []) for ids, row in zip(sequences, self._last_logits(sequences), strict=True)]

    def place(self, prefixes: Sequence[tuple[Prefix, int]]) -> None:
        self._sequences.extend(list(prefix.ids) for prefix, count in prefixes for _ in range(count))
        self._count()

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        for sequence, token in zip(self._sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        self._count()
        return torch.stack(self._last_logits(self._sequences))

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        self._sequences = [self._sequences[row] for row in order]
        self._count()

    def _count(self) -> None:
        self.lengths = np.array([len(sequence) for sequence in self._sequences], dtype=np.int64)

    def _last_logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for members, ids, mask, positions in self._by_length(sequences):
            found.update(zip(members, self._forward(ids, mask, positions, None), strict=True))
        return [found[index] for index in range(len(sequences))]
