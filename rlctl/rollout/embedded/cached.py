"""Most causal LMs through transformers' own forward, with the library's dynamic cache of keys and values.

The rows' caches end at one common right edge: every tick appends a column to all of them, and a mask hides what lies
left of a row's first token. That is left padding as every transformers model knows it, so nothing here depends on the
architecture; positions are given per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from rlctl.errors import UnavailableError
from rlctl.rollout.embedded.decoder import Prefix
from rlctl.rollout.embedded.transformers_model import TransformersDecoder


class CachedDecoder(TransformersDecoder):
    """A transformers model that keeps keys and values, and nothing else, of past tokens."""

    name = "cached"

    def allocate_cache(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.lengths = np.zeros(0, dtype=np.int64)

    def free_cache(self) -> None:
        self.allocate_cache()

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
        found: dict[int, Prefix] = {}
        for members, ids, mask, positions in self._by_length(sequences):
            cache = DynamicCache()
            logits = self._forward(ids, mask, positions, cache)
            self._check_cache(cache, ids.shape[1])
            for at, index in enumerate(members):
                layers = [(layer.keys[at], layer.values[at]) for layer in cache.layers]
                found[index] = Prefix(sequences[index], logits[at], layers)
        return [found[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def place(self, prefixes: Sequence[tuple[Prefix, int]]) -> None:
        width = max([int(self.lengths.max(initial=0)), *(len(prefix.ids) for prefix, _ in prefixes)])
        layers = len(prefixes[0][0].cache)
        for side, held in ((0, self._keys), (1, self._values)):
            new = [
                torch.cat(
                    [
                        _pad_left(prefix.cache[layer][side], width)[None].expand(count, -1, -1, -1)
                        for prefix, count in prefixes
                    ]
                )
                for layer in range(layers)
            ]
            held[:] = [torch.cat([_pad_left(old, width), n]) for old, n in zip(held, new, strict=True)] if held else new
        self.lengths = np.concatenate([self.lengths, *(np.full(count, len(prefix.ids)) for prefix, count in prefixes)])

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        lengths = torch.from_numpy(self.lengths).to(self._device)
        width = self._keys[0].shape[-2]
        columns = torch.arange(width + 1, device=self._device)
        mask = (columns >= width - lengths[:, None]).long()
        cache = DynamicCache(list(zip(self._keys, self._values, strict=True)))
        logits = self._forward(tokens[:, None], mask, lengths[:, None], cache)
        self._keys = [layer.keys for layer in cache.layers]
        self._values = [layer.values for layer in cache.layers]
        self.lengths = self.lengths + 1
        return logits

    @torch.inference_mode()
    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        self.lengths = self.lengths[order]
        if not len(order):
            self.allocate_cache()
            return
        rows, width = torch.from_numpy(order).to(self._device), int(self.lengths.max())
        self._keys = [k[rows, ..., -width:, :] for k in self._keys]
        self._values = [v[rows, ..., -width:, :] for v in self._values]

    def _check_cache(self, cache: DynamicCache, length: int) -> None:
        plain = cache.layers and all(
            type(layer) is DynamicLayer and layer.is_initialized and layer.keys.shape[-2] == length
            for layer in cache.layers
        )
        if not plain:
            raise UnavailableError(
                f"{type(self._model).__name__} keeps more than keys and values between tokens",
                fix="the transformers rollout engine cannot batch it; choose another rollout.engine",
            )


def _pad_left(columns: Tensor, width: int) -> Tensor:
    """Return ``columns`` [..., length, dim] cut or filled with zeros on the left to [..., width, dim]."""
    missing = width - columns.shape[-2]
    return F.pad(columns, (0, 0, missing, 0)) if missing else columns
