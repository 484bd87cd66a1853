"""The fused forward over tensor-parallel ranks.

Each rank runs its own query heads over its own key-value heads, so the cache is cut too, and its own stretch of the
feed-forward; two sums a layer bring the residual stream together, as in Megatron-LM (arXiv 1909.08053, section 3).
Embedding and head are cut by token id, or whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.hybrid.tp.group import TensorGroup
from rlctl.hybrid.tp.part import Part
from rlctl.hybrid.tp.weights import AdoptedWeights
from rlctl.rollout.embedded.fused import FusedDecoder
from rlctl.rollout.embedded.fused_weights import LayerWeights


class TensorParallelDecoder(FusedDecoder):
    """This rank's part of a model of the Llama, Qwen2 or Qwen3 family, and of the rows of its cache.

    The ranks of ``group`` make the same calls. Logits are whole on every rank.

    Args:
        config: the transformers configuration.
        part: this rank's share.
        group: the replica's ranks.
        dtype, device, max_rows, max_length: see ``FusedDecoder``.
    """

    name = "tensor-parallel"

    def __init__(
        self,
        config: Any,
        part: Part,
        group: TensorGroup,
        *,
        dtype: torch.dtype,
        device: str,
        max_rows: int,
        max_length: int,
    ) -> None:
        super().__init__(config, part.shape, dtype=dtype, device=device, max_rows=max_rows, max_length=max_length)
        self.vocab_size = part.whole.vocab
        self._part, self._group = part, group

    def adopt(self, shards: Mapping[str, Tensor]) -> None:
        """Compute with these tensors from now on; see ``AdoptedWeights``."""
        self._weights = AdoptedWeights(self._shape, shards)

    def _embed(self, ids: Tensor) -> Tensor:
        embed = self._ready_weights().embed
        if self._part.whole_vocab:
            return F.embedding(ids, embed)
        low, high = self._part.vocabulary
        mine = (ids >= low) & (ids < high)
        if low == high:
            found = torch.zeros((*ids.shape, self._shape.hidden), dtype=embed.dtype, device=embed.device)
        else:
            found = F.embedding((ids - low).where(mine, 0), embed) * mine[..., None]
        return self._group.sum(found)

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        s = self._shape
        x = x + self._together(F.linear(mixed, layer.o), layer.o_bias)
        gate_up = F.linear(F.rms_norm(x, (s.hidden,), layer.mlp_norm, s.eps), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        return x.add_(self._together(F.linear(F.silu(gate).mul_(up), layer.down), layer.down_bias))

    def _logits(self, x: Tensor) -> Tensor:
        logits = super()._logits(x)
        if self._part.whole_vocab or self._group.size == 1:
            return logits
        padded = F.pad(logits, (0, self._part.rows - logits.shape[-1]))
        return self._group.gather(padded).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def _together(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of the ranks' products; a bias, which every rank has whole, counts once."""
        total = self._group.sum(partial)
        return total if bias is None else total.add_(bias)
