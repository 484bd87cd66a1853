"""The fast path: our own forward of the Llama, Qwen2 and Qwen3 families over a static cache.

Keys are stored [row, kv head, feature, position] and values [row, kv head, position, feature], so that both products
of attention read memory in order, with the query heads of one kv head as the rows of one small product.

On the CPUs measured, matrix products give a row the same bits for any number of rows from 4 on, on every thread that
works at one, and a sum over positions gives the same bits for any width that is a multiple of 16, as long as the
library does not split it, which it starts to do past 192. So rows and widths are padded, and longer sums are cut every
128 positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlctl.rollout.embedded.decoder import Decoder, Prefix
from rlctl.rollout.embedded.fused_weights import FusedShape, FusedWeights, LayerWeights

_ROWS_PER_THREAD = 4
_WIDTH = 16
_SUM_WIDTH = 128
_SMALL_PRODUCT = 400  # below this many multiplications torch.bmm leaves the library for a loop of its own
_PREFILL_TOKENS = 8192


class FusedDecoder(Decoder):
    """A model of the Llama, Qwen2 or Qwen3 family and the rows of its cache.

    The cache holds ``2 * layers * kv_heads * head_dim * max_rows * max_length`` elements.

    Args:
        config: the transformers configuration that ``shape`` was made from.
        shape: sizes of the model.
        dtype: of weights and cache.
        device: where both live.
        max_rows: most rows in use at once.
        max_length: most tokens in a row.
    """

    name = "fused"

    def __init__(
        self, config: Any, shape: FusedShape, *, dtype: torch.dtype, device: str, max_rows: int, max_length: int
    ) -> None:
        self.vocab_size = shape.vocab
        self._shape, self._dtype, self._device = shape, dtype, device
        self._rows, self._step = _padded_rows(max_rows), _WIDTH
        while self._step * shape.heads // shape.kv_heads * shape.head_dim < _SMALL_PRODUCT and self._step < _SUM_WIDTH:
            self._step *= 2
        self._width = _round_up(max_length, self._step)
        # An odd number of 16-column groups keeps the feature rows of a key from falling on the same cache sets.
        self._stride = self._width + (_WIDTH if self._width // _WIDTH % 2 == 0 else 0)
        rotary = LlamaRotaryEmbedding(config).to(device)
        positions = torch.arange(self._width, device=device)[None]
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        half = shape.head_dim // 2
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._columns = torch.arange(self._width, device=device)
        self._hidden, self._seen = (torch.tensor(bias, dtype=dtype, device=device) for bias in (-math.inf, 0.0))
        self._row_ids = torch.arange(self._rows, device=device)
        self._weights: FusedWeights | None = None
        self.free_cache()

    def allocate_weights(self) -> None:
        self._weights = FusedWeights(self._shape, self._dtype, self._device)

    def free_weights(self) -> None:
        self._weights = None

    def named_weights(self) -> dict[str, Tensor]:
        assert self._weights is not None
        return self._weights.named

    def aliases(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self._shape.tied else {}

    def allocate_cache(self) -> None:
        s = self._shape
        size = (s.layers, self._rows, s.kv_heads)
        self._keys = _zeros((*size, s.head_dim, self._stride), self._dtype, self._device)
        self._values = _zeros((*size, self._stride, s.head_dim), self._dtype, self._device)
        self.lengths = np.zeros(0, dtype=np.int64)

    def free_cache(self) -> None:
        self._keys = self._values = torch.empty(0)
        self.lengths = np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
        # Only sequences of one padded length share a pass: the shape of a sequence's products is its own alone.
        by_width: dict[int, list[int]] = {}
        for index, ids in enumerate(sequences):
            by_width.setdefault(_round_up(len(ids), _WIDTH), []).append(index)
        found: dict[int, Prefix] = {}
        for width, members in by_width.items():
            at_once = max(1, _PREFILL_TOKENS // width)
            for start in range(0, len(members), at_once):
                chunk = members[start : start + at_once]
                found.update(zip(chunk, self._prefill([sequences[i] for i in chunk], width), strict=True))
        return [found[index] for index in range(len(sequences))]

    def _prefill(self, sequences: Sequence[tuple[int, ...]], width: int) -> list[Prefix]:
        s, weights, count = self._shape, self._ready_weights(), len(sequences)
        while _padded_rows(count * width) != count * width:
            count += 1
        ids = torch.zeros((count, width), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        x = self._embed(ids.to(self._device)).view(count * width, s.hidden)
        cos, sin = self._cos[:width].repeat(count, 1)[:, None], self._sin[:width].repeat(count, 1)[:, None]
        caches: list[tuple[Tensor, Tensor]] = []
        for layer in weights.layers:
            q, k, v = (t.view(count, width, -1, s.head_dim).transpose(1, 2) for t in self._qkv(layer, x, cos, sin))
            groups = s.heads // s.kv_heads
            wide = (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))
            mixed = F.scaled_dot_product_attention(q, *wide, is_causal=True)
            x = self._finish(layer, x, mixed.transpose(1, 2).reshape(count * width, -1))
            caches.append((k.transpose(2, 3), v))
        ends = torch.tensor([row * width + len(ids) - 1 for row, ids in enumerate(sequences)], device=self._device)
        logits = self._logits(F.pad(x[ends], (0, 0, 0, _padded_rows(len(ends)) - len(ends))))
        return [Prefix(ids, logits[row], [(k[row], v[row]) for k, v in caches]) for row, ids in enumerate(sequences)]

    @torch.inference_mode()
    def place(self, prefixes: Sequence[tuple[Prefix, int]]) -> None:
        start = len(self.lengths)
        for prefix, count in prefixes:
            width = prefix.cache[0][0].shape[-1]
            for layer, (keys, values) in enumerate(prefix.cache):
                self._keys[layer, start : start + count, :, :, :width] = keys
                self._values[layer, start : start + count, :, :width] = values
            start += count
        self.lengths = np.concatenate([self.lengths, *(np.full(count, len(prefix.ids)) for prefix, count in prefixes)])

    @torch.inference_mode()
    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        moved = np.flatnonzero(order != np.arange(len(order)))
        self.lengths = self.lengths[order]
        if len(moved):
            width = int(self.lengths[moved].max())
            to, source = torch.from_numpy(moved), torch.from_numpy(order[moved])
            self._keys[:, to, :, :, :width] = self._keys[:, source, :, :, :width]
            self._values[:, to, :, :width] = self._values[:, source, :, :width]

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        s, weights, count = self._shape, self._ready_weights(), len(tokens)
        # The padding computes rows that are not in use, at position 0, where nobody reads.
        spare = min(_padded_rows(count), self._rows) - count
        rows = count + spare
        padded = np.zeros(rows, dtype=np.int64)
        padded[:count] = self.lengths
        positions = torch.from_numpy(padded).to(self._device)
        if spare:
            tokens = F.pad(tokens, (0, spare))
        width = _round_up(int(padded.max()) + 1, self._step)
        hidden = self._columns[:width] > positions.repeat_interleave(s.kv_heads)[:, None, None]
        bias = torch.where(hidden, self._hidden, self._seen)
        index = self._row_ids[:rows]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = self._embed(tokens)
        for number, layer in enumerate(weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = self._keys[number], self._values[number]
            keys[index, :, :, positions] = k
            values[index, :, positions] = v
            x = self._finish(layer, x, self._attend(q, keys[:rows], values[:rows], bias))
        self.lengths = self.lengths + 1
        return self._logits(x)[:count]

    def _ready_weights(self) -> FusedWeights:
        assert self._weights is not None
        return self._weights

    def _embed(self, ids: Tensor) -> Tensor:
        """Return [..., hidden] of token ids [...]."""
        return F.embedding(ids, self._ready_weights().embed)

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [n, heads, dim], rotated keys and values [n, kv_heads, dim] of ``x`` [n, hidden].

        Args:
            cos, sin: [n, 1, dim] of each row's position; the first half of ``sin`` is negated.
        """
        s = self._shape
        qkv = F.linear(F.rms_norm(x, (s.hidden,), layer.norm, s.eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x.shape[0], -1, s.head_dim)
        qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            size = (s.head_dim,)
            q = F.rms_norm(qk[:, : s.heads], size, layer.q_norm, s.eps)
            qk = torch.cat((q, F.rms_norm(qk[:, s.heads :], size, layer.k_norm, s.eps)), dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((second, first), dim=-1), sin)
        return qk[:, : s.heads], qk[:, s.heads :], v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Return [n, heads * dim] of queries [n, heads, dim] over caches [n, kv_heads, ...]."""
        s, width = self._shape, bias.shape[-1]
        pairs = q.shape[0] * s.kv_heads
        keys, values = keys.view(pairs, s.head_dim, -1), values.view(pairs, -1, s.head_dim)
        q = q.reshape(pairs, s.heads // s.kv_heads, s.head_dim)
        weights = torch.baddbmm(bias, q, keys[:, :, :width], alpha=s.head_dim**-0.5).softmax(dim=-1)
        mixed = torch.bmm(weights[:, :, :_SUM_WIDTH], values[:, : min(width, _SUM_WIDTH)])
        for start in range(_SUM_WIDTH, width, _SUM_WIDTH):
            stop = min(start + _SUM_WIDTH, width)
            mixed.baddbmm_(weights[:, :, start:stop], values[:, start:stop])
        return mixed.view(pairs // s.kv_heads, -1)

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """Return ``x`` [n, hidden] after the output projection of attention and the MLP, both residual."""
        s = self._shape
        x = x + F.linear(mixed, layer.o, layer.o_bias)
        gate, up = F.linear(F.rms_norm(x, (s.hidden,), layer.mlp_norm, s.eps), layer.gate_up, layer.gate_up_bias).chunk(
            2, -1
        )
        return x.add_(F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias))

    def _logits(self, x: Tensor) -> Tensor:
        weights = self._ready_weights()
        return F.linear(F.rms_norm(x, (self._shape.hidden,), weights.norm, self._shape.eps), weights.head)


def _padded_rows(rows: int) -> int:
    return _round_up(rows, _ROWS_PER_THREAD * torch.get_num_threads())


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros; a masked position enters the sums with weight 0, and 0 times an old NaN would be NaN.

    On the CPU the pages come from the system on first touch: a long ``max_length`` costs nothing until it is used.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
