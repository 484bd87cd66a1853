"""A language model's body with a head of one number."""

from __future__ import annotations

from typing import Any

import torch

from rlctl.model.micro_batches import MicroBatch


class ValueModel(torch.nn.Module):
    """Values of states. The head begins at zero, so that an untrained critic says 0 everywhere.

    Args:
        causal_lm: a transformers causal LM; its body becomes part of this model, its head is left behind.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.body = causal_lm.base_model
        self.head = torch.nn.Linear(causal_lm.get_input_embeddings().weight.shape[1], 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the value of the state before each response token, float32 (T,)."""
        hidden = self.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden.flatten(0, 1)[batch.positions]).squeeze(1)
        return values.float()
