"""The model in this process, whole, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.algorithms.losses import Tokens
from rlctl.algorithms.registry import LOSSES
from rlctl.experience.rows import Floats, Row
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.model.digest import tensors_digest
from rlctl.model.forward import response_log_probs
from rlctl.model.micro_batches import MicroBatch, micro_batch, partition
from rlctl.model.schedule import learning_rate
from rlctl.schema.training import OptimizerConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        self._dtype = _DTYPES[dtype]
        self._settings = optimizer
        self._budget = micro_batch_tokens
        self._total_updates = total_updates
        self._updates = 0
        self._pad_id = model.config.pad_token_id or 0
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            fused=True,
        )

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        result: list[Floats] = [np.zeros(0, np.float32)] * len(rows)
        with torch.no_grad():
            for batch in self._micro_batches(rows):
                with self._autocast():
                    values = response_log_probs(self.model, batch, temperature=temperature)
                _scatter(values, batch, rows, result)
        return result

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        loss_fn = partial(LOSSES.load(loss.name), **loss.options)
        lengths = torch.tensor([len(row.response_ids) for row in rows])
        weights = token_weights(loss.aggregation, lengths, horizon=loss.horizon)
        logprobs: list[Floats] = [np.zeros(0, np.float32)] * len(rows)
        sums: dict[str, float] = {"loss": 0.0}
        rate = learning_rate(self._settings, self._updates, self._total_updates)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self._micro_batches(rows):
            with self._autocast():
                values = response_log_probs(self.model, batch, temperature=loss.temperature)
            _scatter(values.detach(), batch, rows, logprobs)
            result = loss_fn(self._tokens(values, batch, rows, weights))
            result.loss.backward()
            sums["loss"] += result.loss.item() * int(lengths.sum())
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        metrics = {name: value / max(int(lengths.sum()), 1) for name, value in sums.items()}
        metrics.update(self._step(rate), lr=rate)
        return UpdateResult(metrics, logprobs, sum(row.length for row in rows))

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self._dtype)

    def offload(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)

    def state(self) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        moments = {name: self.optimizer.state[p] for name, p in named.items() if p in self.optimizer.state}
        return {
            "updates": self._updates,
            "params": {name: p.detach() for name, p in named.items()},
            "exp_avg": {name: s["exp_avg"] for name, s in moments.items()},
            "exp_avg_sq": {name: s["exp_avg_sq"] for name, s in moments.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        named = dict(self.model.named_parameters())
        if named.keys() != state["params"].keys():
            odd = sorted(named.keys() ^ state["params"].keys())
            raise ValueError(f"checkpoint and model differ in {len(odd)} parameters, {odd[0]} first")
        self._updates = int(state["updates"])
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(state["params"][name])
        self.optimizer.state.clear()
        for name, moment in state["exp_avg"].items():
            parameter = named[name]
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self._updates), device=parameter.device),
                "exp_avg": moment.to(parameter.device, copy=True),
                "exp_avg_sq": state["exp_avg_sq"][name].to(parameter.device, copy=True),
            }

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def params_digest(self) -> str:
        return tensors_digest(self.model.named_parameters())

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        for indices in partition([row.length for row in rows], self._budget):
            yield micro_batch(rows, indices, pad_id=self._pad_id, device=self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    def _tokens(self, values: torch.Tensor, batch: MicroBatch, rows: Sequence[Row], weights: torch.Tensor) -> Tokens:
        chosen = [rows[i] for i in batch.indices]
        old = [row.old_logprobs for row in chosen]
        old_logprobs = (
            values.detach()
            if any(part is None for part in old)
            else torch.from_numpy(np.concatenate([part for part in old if part is not None])).to(self.device)
        )
        advantages = torch.from_numpy(np.concatenate([row.advantages for row in chosen])).to(self.device)
        token_weight = weights[torch.tensor(batch.indices)].to(self.device)[batch.row]
        return Tokens(values, old_logprobs, advantages, token_weight, batch.row)

    def _step(self, rate: float) -> dict[str, float]:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self._settings.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not np.isfinite(norm):
            # One bad batch must not destroy the weights; the trainer reports the skipped update.
            self.optimizer.zero_grad(set_to_none=True)
            return {"grad_norm": norm, "skipped_updates": 1.0}
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return {"grad_norm": norm, "skipped_updates": 0.0}

    def _move(self, device: torch.device) -> None:
        if next(self.model.parameters()).device == device:
            return
        self.model.to(device)
        for moments in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = moments[name].to(device)


def _scatter(values: torch.Tensor, batch: MicroBatch, rows: Sequence[Row], result: list[Floats]) -> None:
    """File the flat ``values`` of a micro-batch under the rows they belong to."""
    pieces = values.cpu().split([len(rows[i].response_ids) for i in batch.indices])
    for index, piece in zip(batch.indices, pieces, strict=True):
        result[index] = piece.numpy()
