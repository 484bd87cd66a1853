"""The critic in this process, whole, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.algorithms.value_loss import value_loss
from rlctl.experience.rows import Floats, Row
from rlctl.model.critic.base import Critic
from rlctl.model.critic.value_model import ValueModel
from rlctl.model.digest import tensors_digest
from rlctl.model.optimizing import Optimizing
from rlctl.model.passes import Passes, gather
from rlctl.schema.training import OptimizerConfig


class LocalCritic(Critic):
    """Full finetuning in float32 with AdamW; bfloat16 by autocast.

    Args:
        causal_lm: whose body the critic takes over; nobody else may use it.
        optimizer: AdamW's settings.
        dtype: element type of activations, "float32" or "bfloat16".
        micro_batch_tokens: most tokens of one pass, padding counted.
        total_updates: optimizer steps of the whole run, for the schedule.
        device: where the model computes.
    """

    def __init__(
        self,
        causal_lm: Any,
        optimizer: OptimizerConfig,
        *,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self.model = ValueModel(causal_lm).to(self._device).train()
        self._passes = Passes(
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            pad_id=causal_lm.config.pad_token_id or 0,
            device=self._device,
        )
        self._optimizing = Optimizing(self.model, optimizer, total_updates)

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        return self._passes.each_token(rows, self.model)

    def update(self, rows: Sequence[Row], *, clip: float | None) -> dict[str, float]:
        lengths = torch.tensor([row.trained for row in rows])
        weights = token_weights("token-mean", lengths, horizon=1)
        count = max(int(lengths.sum()), 1)
        sums: dict[str, float] = {"critic/loss": 0.0}
        self._optimizing.clear()
        for batch in self._passes.micro_batches(rows):
            take = partial(gather, rows, batch, device=self._device)
            with self._passes.autocast():
                values = self.model(batch)
            mask = torch.from_numpy(np.concatenate([rows[i].mask for i in batch.indices])).to(self._device)
            share = weights[torch.tensor(batch.indices)].to(self._device)[batch.row]
            old, returns = take(lambda row: row.values), take(lambda row: row.returns)
            result = value_loss(values[mask], old[mask], returns[mask], share[mask], clip=clip)
            result.loss.backward()
            sums["critic/loss"] += result.loss.item() * count
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        stepped = self._optimizing.step()
        return {name: value / count for name, value in sums.items()} | {f"critic/{k}": v for k, v in stepped.items()}

    def offload(self) -> None:
        self._optimizing.clear()
        self._optimizing.move(torch.device("cpu"))

    def onload(self) -> None:
        self._optimizing.move(self._device)

    def state(self) -> dict[str, Any]:
        return self._optimizing.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._optimizing.load(state)

    def params_digest(self) -> str:
        return tensors_digest(self.model.named_parameters())
