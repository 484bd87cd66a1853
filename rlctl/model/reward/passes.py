"""One pass of a sequence classifier over a batch of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Classifier:
    """Scores of batches.

    Args:
        model: a frozen transformers sequence classifier.
        output: which output is the score; the only one when None.
        device: where it computes.
    """

    def __init__(self, model: Any, *, output: int | None, device: torch.device | str) -> None:
        self.model = model
        self._output = output or 0
        self._device = torch.device(device)
        # Where it takes the position of the last token from; a composed configuration has an inner one.
        self._config = model.config.get_text_config()
        pad = self._config.pad_token_id
        self._pad = pad if pad is not None and pad >= 0 else None

    def scores(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence; shorter ones are padded on the right, under an attention mask."""
        longest = max(len(ids) for ids in batch)
        pad = _unused(batch) if self._pad is None else self._pad
        self._config.pad_token_id = pad
        input_ids = torch.full((len(batch), longest), pad, dtype=torch.int64)
        mask = torch.zeros((len(batch), longest), dtype=torch.int64)
        for row, ids in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            mask[row, : len(ids)] = 1
        with torch.inference_mode():
            logits = self.model(input_ids=input_ids.to(self._device), attention_mask=mask.to(self._device)).logits
        found: list[float] = logits[:, self._output].float().cpu().tolist()
        return found


def _unused(batch: Sequence[Sequence[int]]) -> int:
    """Return a token that no sequence has: classifiers score at the last token that is not padding."""
    used = {token for ids in batch for token in ids}
    return next(token for token in range(len(used) + 1) if token not in used)
