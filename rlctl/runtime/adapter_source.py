"""A LoRA engine as the source of weight syncs that carry its adapter alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlctl.model.lora import LoraEngine
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.runtime.ranks.adapted import RankedLoraEngine


class AdapterSource:
    """A ``WeightSource``: the adapter under PEFT's names, and the base before it as long as the replica lacks it.

    Args:
        model: the trainer's.
        replica: the one that is sent to.
    """

    def __init__(self, model: LoraEngine | RankedLoraEngine, replica: AdapterUpdates) -> None:
        self._model = model
        self._replica = replica

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSource."""
        if not self._replica.holds_base:
            yield from self._model.base_params()
        yield from self._model.adapter_params()

    def offload(self) -> None:
        """See WeightSource."""
        self._model.offload()
