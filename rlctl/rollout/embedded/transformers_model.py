"""A transformers model as a decoder sees it: weights by name, and one forward whatever the architecture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.initialization import no_init_weights

from rlctl.model_making import ONE_AT_A_TIME
from rlctl.rollout.embedded.decoder import Decoder


class TransformersDecoder(Decoder):
    """What the decoders over transformers' forward share.

    Args:
        model: from ``empty_model``.
        device: where it lives.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
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

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None) -> Tensor:
        """Return [n, vocab] logits after the last column of ``ids`` [n, length].

        Args:
            mask: [n, cached + length] 1 where a token is.
            positions: [n, length] of the tokens in their sequences.
            cache: read and extended; None runs without one.
        """
        wanted = {"position_ids": positions, "use_cache": cache is not None, "logits_to_keep": 1}
        # transformers renamed the argument within version 5.
        wanted["cache" if "cache" in self._takes else "past_key_values"] = cache
        given = {name: value for name, value in wanted.items() if name in self._takes}
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask, **given).logits[:, -1]
        return logits

    def _by_length(self, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
        """Yield indices, ids, mask and positions of the sequences of each length, for a pass without any padding."""
        by_length: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(index)
        for length, members in by_length.items():
            ids = torch.tensor([list(sequences[i]) for i in members], device=self._device)
            yield members, ids, torch.ones_like(ids), torch.arange(length, device=self._device).expand_as(ids)


def empty_model(config: Any, *, dtype: torch.dtype, device: str, trust_remote_code: bool) -> Any:
    """Return a causal LM for ``config`` whose weights are allocated but not initialised."""
    with ONE_AT_A_TIME, no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def keeps_keys_and_values(model: Any) -> bool:
    """Tell whether all that a model keeps of past tokens is a key and a value of each, per layer.

    Recurrent states cannot be aligned by padding, and chunked attention counts from the first column.
    """
    if getattr(model, "_is_stateful", False) or getattr(model.config, "attention_chunk_size", None) is not None:
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
