"""The reference model: frozen, it only scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.model.forward import response_log_probs
from rlctl.model.passes import Passes


class Reference(Protocol):
    """What scores responses for a KL: a model of its own, or the policy's with its adapter switched off."""

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the log-probs of each row's response tokens."""

    def offload(self) -> None:
        """Give device memory back."""

    def onload(self) -> None:
        """Undo ``offload``. Calling either twice is harmless."""


class ReferenceModel:
    """A causal language model whose log-probs the policy is held near.

    Args:
        model: a transformers causal LM in float32; it is never changed.
        dtype: element type of activations, "float32" or "bfloat16".
        micro_batch_tokens: most tokens of one pass, padding counted.
        device: where the model computes.
    """

    def __init__(self, model: Any, *, dtype: str, micro_batch_tokens: int, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._model = model.requires_grad_(False).eval()
        self._passes = Passes(
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            pad_id=model.config.pad_token_id or 0,
            device=self._device,
        )

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the log-probs of each row's response tokens."""
        return self._passes.each_token(rows, partial(response_log_probs, self._model, temperature=temperature))

    def offload(self) -> None:
        """Move to host memory."""
        self._model.to("cpu")

    def onload(self) -> None:
        """Move to the device."""
        self._model.to(self._device)
