"""The model under an adapter as a reference: the adapter is switched off while it scores, nothing is held twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlctl.experience.rows import Floats, Row
from rlctl.model.forward import response_log_probs
from rlctl.model.passes import Passes


class BareBase:
    """A ``Reference``; bit-equal to a model of its own with the base's weights.

    Args:
        model: a transformers causal LM with PEFT layers in it, in training mode. It moves with the engine that trains
            it.
        passes: of that engine.
    """

    def __init__(self, model: Any, passes: Passes) -> None:
        self._model = model
        self._passes = passes

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """See Reference."""
        with self._switched_off():
            return self._passes.each_token(rows, partial(response_log_probs, self._model, temperature=temperature))

    def offload(self) -> None:
        """See Reference."""

    def onload(self) -> None:
        """See Reference."""

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]
        self._model.eval()
        try:
            for layer in layers:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # PEFT has them trained again, too
            self._model.train()
