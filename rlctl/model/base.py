"""What a model engine does for a trainer. One subclass a way of spreading the model over devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Floats, Row
from rlctl.model.memory_settings import NOTHING_SAVED, Memory
from rlctl.schema.training import OptimizerConfig


@dataclass(frozen=True)
class LossSpec:
    """What an update minimises, and how its tokens are weighed. All by name, so that it can be sent to another process.

    Attributes:
        objective: policy loss, KL term and entropy bonus.
        aggregation: entry of ``rlctl.algorithms.aggregation.MODES``.
        horizon: longest response allowed, in tokens.
        temperature: that of the rollouts; log-probs are of the scaled distribution.
    """

    objective: Objective
    aggregation: str
    horizon: int
    temperature: float = 1.0


@dataclass
class UpdateResult:
    """One optimizer step.

    Attributes:
        metrics: loss, grad_norm, lr, and the loss's own, as means over the mini batch's trained tokens.
        logprobs: of each row's response tokens before the update, in the order of the rows given.
        tokens: prompt and response tokens that went through the model, padding not counted.
        micro_batches: row indexes of each pass of each rank that shared the rows, in order.
    """

    metrics: dict[str, float]
    logprobs: list[Floats]
    tokens: int
    micro_batches: Sequence[Sequence[Sequence[int]]] = ()


class ModelEngine(ABC):
    """A causal language model with its optimizer.

    The methods are called in lockstep on all ranks of an engine that has several.

    Args:
        model: a transformers causal LM in float32.
        optimizer: AdamW's settings.
        dtype: element type of the weights handed to rollouts, "float32" or "bfloat16".
        micro_batch_tokens: most tokens of one pass, padding counted.
        total_updates: optimizer steps of the whole run, for the schedule.
        device: where the model computes.
        memory: how device memory is saved.
    """

    @abstractmethod
    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        *,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        device: torch.device | str = "cpu",
        memory: Memory = NOTHING_SAVED,
    ) -> None: ...

    @abstractmethod
    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return the log-probs of each row's response tokens under the current weights, without gradient."""

    @abstractmethod
    def keep_policy(self) -> None:
        """Keep a copy of the trained parameters as they are now, in place of an earlier one (host memory)."""

    @abstractmethod
    def kept_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return what ``log_probs`` would under the parameters of the last ``keep_policy``; the current ones stay."""

    @abstractmethod
    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        """Take one optimizer step on a mini batch."""

    @abstractmethod
    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, full tensor) one at a time, in the rollout's dtype, tied copies left out."""

    @abstractmethod
    def offload(self) -> None:
        """Give device memory back: gradients freed, and what ``memory`` says moved to host memory."""

    @abstractmethod
    def onload(self) -> None:
        """Undo ``offload``. Calling either twice is harmless."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return parameters and optimizer state as a nested dict of tensors and plain values."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Replace parameters and optimizer state by an earlier ``state()``, exactly."""

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that ``from_pretrained`` loads (the tokenizer is written by the caller)."""

    @abstractmethod
    def params_digest(self) -> str:
        """Return the SHA-256 of all parameters: names, dtypes, shapes and bytes, in name order."""
