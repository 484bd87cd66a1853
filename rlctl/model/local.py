"""The model in this process, whole, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.algorithms.losses import Tokens
from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Floats, Row
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.model.digest import tensors_digest
from rlctl.model.forward import response_log_probs, response_scores
from rlctl.model.micro_batches import MicroBatch
from rlctl.model.optimizing import Optimizing
from rlctl.model.passes import Passes, empty, gather, scatter
from rlctl.schema.training import OptimizerConfig


class LocalEngine(ModelEngine):
    """Full finetuning with float32 masters and AdamW; bfloat16 by autocast."""

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        *,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device).train()
        self._passes = Passes(
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            pad_id=model.config.pad_token_id or 0,
            device=self.device,
        )
        self._optimizing = Optimizing(self.model, optimizer, total_updates)

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        return self._passes.each_token(rows, partial(response_log_probs, self.model, temperature=temperature))

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        lengths = torch.tensor([row.trained for row in rows])
        weights = token_weights(loss.aggregation, lengths, horizon=loss.horizon)
        logprobs = empty(rows)
        sums: dict[str, float] = {"loss": 0.0}
        if loss.objective.needs_batch_first:
            loss = replace(loss, objective=self._with_batch(rows, loss))
        self._optimizing.clear()
        for batch in self._passes.micro_batches(rows):
            with self._passes.autocast():
                values, entropy = response_scores(
                    self.model, batch, temperature=loss.temperature, entropy=loss.objective.needs_entropy
                )
            scatter(values.detach(), batch, rows, logprobs)
            result = loss.objective(self._tokens(values, entropy, batch, rows, weights, loss))
            result.loss.backward()
            sums["loss"] += result.loss.item() * int(lengths.sum())
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        metrics = {name: value / max(int(lengths.sum()), 1) for name, value in sums.items()}
        metrics |= self._optimizing.step()
        return UpdateResult(metrics, logprobs, sum(row.length for row in rows))

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self._passes.dtype)

    def offload(self) -> None:
        self._optimizing.clear()
        self._optimizing.move(torch.device("cpu"))
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

    def _with_batch(self, rows: Sequence[Row], loss: LossSpec) -> Objective:
        """Return the objective once it knows the mini batch, at the price of a forward pass."""
        train = torch.from_numpy(np.concatenate(self.log_probs(rows, temperature=loss.temperature)))
        rollout = torch.from_numpy(np.concatenate([row.rollout_logprobs for row in rows]))
        mask = torch.from_numpy(np.concatenate([row.mask for row in rows]))
        row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r.response_ids) for r in rows]))
        return loss.objective.for_mini_batch(train[mask], rollout[mask], row[mask])

    def _tokens(
        self,
        values: torch.Tensor,
        entropy: torch.Tensor | None,
        batch: MicroBatch,
        rows: Sequence[Row],
        weights: torch.Tensor,
        loss: LossSpec,
    ) -> Tokens:
        """Return the trained tokens of a micro-batch."""
        chosen = [rows[i] for i in batch.indices]
        take = partial(gather, rows, batch, device=self.device)
        known = all(row.old_logprobs is not None for row in chosen)
        weighed = all(row.importance is not None for row in chosen)
        tokens = Tokens(
            logprobs=values,
            old_logprobs=take(lambda row: row.old_logprobs) if known else values.detach(),
            advantages=take(lambda row: row.advantages),
            weights=weights[torch.tensor(batch.indices)].to(self.device)[batch.row],
            row=batch.row,
            importance=take(lambda row: row.importance) if weighed else None,
            rollout_logprobs=take(lambda row: row.rollout_logprobs) if loss.objective.needs_rollout_logprobs else None,
            ref_logprobs=take(lambda row: row.ref_logprobs) if loss.objective.kl is not None else None,
            entropy=entropy,
        )
        if all(row.trained == len(row.response_ids) for row in chosen):
            return tokens
        return select(tokens, torch.from_numpy(np.concatenate([row.mask for row in chosen])).to(self.device))


def select(tokens: Tokens, mask: torch.Tensor) -> Tokens:
    """Return the tokens that ``mask`` (bool, (T,)) names."""
    parts = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(tokens, **{name: part[mask] for name, part in parts.items() if part is not None})
