"""Any causal LM through transformers' own forward, with the library's dynamic cache of keys and values.

The rows' caches end at one common right edge: every tick appends a column to all of them, and a mask hides what lies
left of a row's first token. That is left padding as every transformers model knows it, so nothing here depends on the
architecture; positions are given per row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.initialization import no_init_weights

from rlctl.errors import UnavailableError
from rlctl.rollout.embedded.decoder import Decoder, Prefix


class GenericDecoder(Decoder):
    """A transformers model and the rows of its cache.

    Args:
        config: a transformers configuration of a causal LM.
        dtype: of weights and cache.
        device: where both live.
        trust_remote_code: let the configuration's own code run.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: str, trust_remote_code: bool) -> None:
        with no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        model.tie_weights()
        self._model: Any = model.eval().requires_grad_(False)
        self._device = device
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._takes = frozenset(inspect.signature(self._model.forward).parameters)
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        self.free_weights()
        self.free_cache()

    def allocate_weights(self) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)

    def free_weights(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def named_weights(self) -> dict[str, Tensor]:
        saved = self._model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in self._model.named_buffers() if name in saved}
        return {**dict(self._model.named_parameters()), **buffers}

    def aliases(self) -> dict[str, str]:
        first: dict[nn.Parameter, str] = {}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: first[p] for name, p in every if first.setdefault(p, name) != name}

    def allocate_cache(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.lengths = np.zeros(0, dtype=np.int64)

    def free_cache(self) -> None:
        self.allocate_cache()

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
        # Only sequences of one length share a pass: no padding, so nothing is asked of the model's masks.
        by_length: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(index)
        found: dict[int, Prefix] = {}
        for length, members in by_length.items():
            ids = torch.tensor([sequences[i] for i in members], device=self._device)
            cache = DynamicCache()
            positions = torch.arange(length, device=self._device).expand_as(ids)
            logits = self._forward(ids, cache, torch.ones_like(ids), positions)
            self._check_cache(cache, length)
            for at, index in enumerate(members):
                layers = [(layer.keys[at], layer.values[at]) for layer in cache.layers]
                found[index] = Prefix(length, logits[at], layers)
        return [found[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def place(self, prefixes: Sequence[tuple[Prefix, int]]) -> None:
        width = max([int(self.lengths.max(initial=0)), *(prefix.length for prefix, _ in prefixes)])
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
        self.lengths = np.concatenate([self.lengths, *(np.full(count, prefix.length) for prefix, count in prefixes)])

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        lengths = torch.from_numpy(self.lengths).to(self._device)
        width = self._keys[0].shape[-2]
        columns = torch.arange(width + 1, device=self._device)
        mask = (columns >= width - lengths[:, None]).long()
        cache = DynamicCache(list(zip(self._keys, self._values, strict=True)))
        logits = self._forward(tokens[:, None], cache, mask, lengths[:, None])
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

    def _forward(self, ids: Tensor, cache: DynamicCache, mask: Tensor, positions: Tensor) -> Tensor:
        """Return [n, vocab] logits after the last column of ``ids`` [n, length], filling ``cache``."""
        wanted = {
            "cache": cache,
            "past_key_values": cache,
            "position_ids": positions,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if "cache" in self._takes:  # transformers renamed the argument within version 5
            del wanted["past_key_values"]
        given = {name: value for name, value in wanted.items() if name in self._takes}
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask, **given).logits[:, -1]
        return logits

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
