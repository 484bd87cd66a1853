"""The model under an adapter as a reference: the adapter is switched off while it scores, nothing is held twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from rlctl.experience.rows import Floats, Row


@runtime_checkable
class Adapted(Protocol):
    """An engine that trains an adapter."""

    def base_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the log-probs of each row's response tokens without the adapter."""


class BareBase:
    """A ``Reference``; bit-equal to a model of its own with the base's weights. It moves with the engine.

    Args:
        engine: trains the adapter.
    """

    def __init__(self, engine: Adapted) -> None:
        self._engine = engine

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """See Reference."""
        return self._engine.base_log_probs(rows, temperature=temperature)

    def offload(self) -> None:
        """See Reference."""

    def onload(self) -> None:
        """See Reference."""


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Have a model with PEFT layers in it, in training mode, compute as if it had none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    model.eval()
    try:
        for layer in layers:
            # PEFT's enable_adapters(False) would have them not trained, too, and FSDP2 asks at its first pass what is.
            layer._disable_adapters = True  # noqa: SLF001
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001
        model.train()
