"""Which decoder runs a model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from rlctl.errors import UsageError
from rlctl.rollout.embedded.cached import CachedDecoder
from rlctl.rollout.embedded.decoder import Decoder
from rlctl.rollout.embedded.fused import FusedDecoder
from rlctl.rollout.embedded.fused_weights import fused_shape
from rlctl.rollout.embedded.recomputing import RecomputingDecoder
from rlctl.rollout.embedded.transformers_model import empty_model, keeps_keys_and_values

Forward = Literal["auto", "fused", "generic"]


def make_decoder(
    config: Any,
    forward: Forward,
    *,
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool,
    max_rows: int,
    max_length: int,
) -> Decoder:
    """Return a decoder for a transformers configuration, without weights and cache.

    Args:
        forward: ``fused`` is our own forward of the Llama, Qwen2 and Qwen3 families, ``generic`` that of
            transformers; ``auto`` takes the fused one where it computes the same.

    Raises:
        UsageError: the fused forward was asked for and lacks something of the model.
    """
    shape = fused_shape(config) if forward != "generic" else None
    if shape is not None:
        return FusedDecoder(config, shape, dtype=dtype, device=device, max_rows=max_rows, max_length=max_length)
    if forward == "fused":
        raise UsageError(f"{type(config).__name__} has features that the fused forward lacks", fix="use forward='auto'")
    model = empty_model(config, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return CachedDecoder(model, device) if keeps_keys_and_values(model) else RecomputingDecoder(model, device)
