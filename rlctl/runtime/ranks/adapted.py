"""A model with an adapter whose ranks are child processes: base and adapter are there, the adapter is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.model_spec import ModelSpec
from rlctl.model.adapter_state import require_same_base, require_same_shapes
from rlctl.model.adapting import base_name
from rlctl.model.bare_base import BareBase
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.supervisor import TrainerRanks


class RankedLoraEngine(RankedEngine):
    """What ``LoraEngine`` is to a trainer, in the ranks; states of one go on in the other.

    Args:
        ranks: that train an adapter.
        base: folder or hub name of the model under it.
        model_config: transformers configuration of that model.
    """

    def __init__(self, ranks: TrainerRanks, base: str, model_config: Any) -> None:
        super().__init__(ranks)
        self._base = base_name(base)
        self.adapter_config = AdapterConfig.parse(ranks.call("adapter_config"))
        stacked = self.adapter_config.target_parameters
        self.experts = ModelSpec.from_config(model_config.to_dict()).moe if stacked else None

    def bare_base(self) -> BareBase:
        """Return the model without its adapter as a reference."""
        return BareBase(self)

    def base_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return what ``log_probs`` would without the adapter."""
        return self._split(rows, "base_log_probs", temperature=temperature)

    def adapter_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``LoraEngine``."""
        return self._named("adapter_weights")

    def base_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``LoraEngine``."""
        return self._named("base_weights")

    def state(self) -> dict[str, Any]:
        """Return the adapter, its optimizer state, and the digest of the model that it belongs to."""
        return {**super().state(), "base_digest": self.base_digest}

    def load(self, state: Mapping[str, Any]) -> None:
        """See ``LoraEngine``. The ranks are asked only for what fits them."""
        require_same_base(state, self.base_digest, self._base)
        shapes = self.ranks.call("trained_shapes")
        require_same_shapes(state["params"], {name: tuple(shape) for name, shape in shapes.items()})
        super().load(state)

    @cached_property
    def base_digest(self) -> str:
        """SHA-256 of the model under the adapter; see ``LoraEngine``."""
        return str(self.ranks.call("base_digest"))
