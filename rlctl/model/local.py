"""The model in this process, whole, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.model.accumulating import Scores, accumulate
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.model.digest import tensors_digest
from rlctl.model.forward import response_log_probs, response_scores
from rlctl.model.kept import KeptParameters
from rlctl.model.memory_settings import NOTHING_SAVED, Memory
from rlctl.model.micro_batches import MicroBatch
from rlctl.model.optimizing import Optimizing
from rlctl.model.passes import Passes
from rlctl.schema.training import OptimizerConfig


class LocalEngine(ModelEngine):
    """Full finetuning with float32 parameters and AdamW; bfloat16 passes by autocast."""

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
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device).train()
        self._memory = memory
        if memory.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._passes = Passes(
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            pad_id=model.config.pad_token_id or 0,
            device=self.device,
            activation_dtype=memory.activation_dtype,
        )
        self._optimizing = Optimizing(self.model, optimizer, total_updates)
        self._kept = KeptParameters()

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        return self._passes.each_token(rows, partial(response_log_probs, self.model, temperature=temperature))

    def keep_policy(self) -> None:
        self._kept.keep(self._trained())

    def kept_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        with self._kept.in_place(self._trained()):
            return self.log_probs(rows, temperature=temperature)

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        self._optimizing.clear()
        metrics, logprobs = self.accumulate(rows, loss)
        tokens = sum(row.length for row in rows)
        return UpdateResult(metrics | self._optimizing.step(), logprobs, tokens, self._passes.shares())

    def accumulate(self, rows: Sequence[Row], loss: LossSpec) -> tuple[dict[str, float], list[Floats]]:
        """Add a mini batch's gradient to the parameters' gradients; return metrics and log-probs as in ``update``."""
        return accumulate(self._score, self._passes, rows, loss)

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self._passes.dtype)

    def offload(self) -> None:
        self._optimizing.clear()
        memory = self._memory
        host = torch.device("cpu")
        self._optimizing.move(host, params=memory.offload_params, moments=memory.offload_optimizer)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._optimizing.move(self.device)

    def state(self) -> dict[str, Any]:
        return self._optimizing.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._optimizing.load(state)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def params_digest(self) -> str:
        return tensors_digest(self.model.named_parameters())

    def _trained(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def _score(self, batch: MicroBatch, temperature: float, entropy: bool) -> Scores:
        return response_scores(self.model, batch, temperature=temperature, entropy=entropy)
