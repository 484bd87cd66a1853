"""The whole model on the only rank, hosted as a rank of several would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.model.accumulating import Scores
from rlctl.model.forward import response_log_probs
from rlctl.model.local import LocalEngine
from rlctl.model.lora import LoraEngine
from rlctl.model.micro_batches import MicroBatch

_KINDS = ("params", "exp_avg", "exp_avg_sq")


class LocalRank(LocalEngine):
    """A ``LocalEngine`` that gives signs of life, and whose state goes and comes one tensor at a time.

    Args:
        on_pass: called when a forward, or forward and backward, pass begins.
    """

    def __init__(self, *args: Any, on_pass: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_pass = on_pass

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        def forward(batch: MicroBatch) -> torch.Tensor:
            self._on_pass()
            return response_log_probs(self.model, batch, temperature=temperature)

        return self._passes.each_token(rows, forward)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (params, exp_avg or exp_avg_sq; parameter; float32 tensor), one at a time."""
        state = self._state()
        for kind in _KINDS:
            for name, tensor in state[kind].items():
                yield kind, name, tensor

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""
        return int(self._state()["updates"])

    def load_tensors(
        self, updates: int, names: Sequence[tuple[str, str]], tensors: Iterator[torch.Tensor] | None
    ) -> None:
        """Become what ``tensors`` described; see ``Fsdp2Engine.load_tensors``."""
        assert tensors is not None
        state: dict[str, Any] = {"updates": updates, **{kind: {} for kind in _KINDS}}
        for (kind, name), tensor in zip(names, tensors, strict=True):
            state[kind][name] = tensor
        self.onload()
        self._optimizing.load(state)

    def _state(self) -> dict[str, Any]:
        return self._optimizing.state()

    def _score(self, batch: MicroBatch, temperature: float, entropy: bool) -> Scores:
        self._on_pass()
        return super()._score(batch, temperature, entropy)


class LocalLoraRank(LocalRank, LoraEngine):
    """The same of a ``LoraEngine``: state is that of the adapter."""
