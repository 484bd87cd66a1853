"""LoRA in this process: an adapter is trained on a frozen model, and rollouts get the two as one set of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rlctl.experience.rows import Floats, Row
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.export import entries, export_adapter
from rlctl.keys.lora.merge import Merger
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.lora.names import Part, parse_key
from rlctl.keys.model_spec import ModelSpec
from rlctl.model.adapter_state import other_adapter, require_same_base
from rlctl.model.adapting import add_adapter, base_name
from rlctl.model.bare_base import BareBase, switched_off
from rlctl.model.base_reference import write_base
from rlctl.model.beginning import begin_with
from rlctl.model.digest import tensors_digest
from rlctl.model.local import LocalEngine
from rlctl.model.locate import find_adapter
from rlctl.model.memory_settings import NOTHING_SAVED, Memory
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig


class LoraEngine(LocalEngine):
    """AdamW on an adapter in float32; the model under it never changes.

    Args:
        model: a transformers causal LM in float32; it gets the adapter, in place.
        optimizer: AdamW's settings.
        lora: rank above 0, alpha, target modules, and the adapter to begin with, if any.
        seed: of the adapter's first values.
        base: folder or hub name that the model came from, for whoever loads the adapter.
        dtype, micro_batch_tokens, total_updates, device, memory: see ``ModelEngine``.

    Attributes:
        experts: how the model names and stores its experts, where they have an adapter.

    Raises:
        UsageError: target modules that the model does not have, that PEFT does not take, or whose change cannot be
            folded in (a tied head, experts of an architecture that rlctl does not know).
        FindingsError: the adapter to begin with is for another model, or is not what ``lora`` says.
        UnavailableError: peft is not installed.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        *,
        lora: LoraConfig,
        seed: int,
        base: str,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        device: torch.device | str = "cpu",
        memory: Memory = NOTHING_SAVED,
    ) -> None:
        self._base = base_name(base)
        self._config = add_adapter(model, lora, seed=seed, base=self._base)
        self.model = model
        shapes = {name: tuple(p.shape) for name, p in self.base_params()}
        tied = bool(model.config.get_text_config().tie_word_embeddings)
        # How the model keeps its experts matters where they have an adapter, and may be unknown elsewhere.
        self.experts = ModelSpec.from_config(model.config.to_dict()).moe if self._config.target_parameters else None
        self._plan = plan_merge(self._adapter().contents, self._config, shapes, tied=tied, moe=self.experts)
        super().__init__(
            model,
            optimizer,
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            total_updates=total_updates,
            device=device,
            memory=memory,
        )
        if lora.adapter is not None:
            begin_with(find_adapter(lora.adapter), self._adapter(), model=self._base, base_digest=self.base_digest)

    def bare_base(self) -> BareBase:
        """Return the model without its adapter as a reference: it shares every tensor with this engine."""
        return BareBase(self)

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights with the adapter folded in, out of place: float32 sums, one cast."""
        merger = Merger(self._adapter(), self._plan, dtype=self._passes.dtype)
        for name, parameter in self.base_params():
            yield name, merger.tensor(name, parameter).to(self._passes.dtype)

    def base_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return what ``log_probs`` would without the adapter."""
        with switched_off(self.model):
            return self.log_probs(rows, temperature=temperature)

    @property
    def adapter_config(self) -> AdapterConfig:
        """The adapter's configuration."""
        return self._config

    def adapter_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter alone, in float32, under the names of PEFT's files."""
        return entries(self._adapter(), "peft-file")

    def base_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model without the adapter, in float32, under transformers names; tied copies left out."""
        for raw, parameter in self.model.named_parameters():
            key = parse_key(raw)
            if key.part is Part.BASE:
                yield key.parameter, parameter.detach()

    def base_and_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``base_params``, and the adapter's tensors under their names in the model."""
        yield from self.base_params()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach()

    def state(self) -> dict[str, Any]:
        """Return the adapter, its optimizer state, and the digest of the model that it belongs to."""
        return {**super().state(), "base_digest": self.base_digest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier ``state()``. Raises RlctlError when it is of another model or another adapter."""
        require_same_base(state, self.base_digest, self._base)
        try:
            super().load(state)
        except ValueError as error:
            raise other_adapter(str(error)) from error

    def save_pretrained(self, folder: Path) -> None:
        """Write the adapter as PEFT and vLLM load it, and a file that says what model it belongs to."""
        export_adapter(self._adapter(), folder, "peft-file")
        write_base(folder, self._base, self.base_digest)

    @cached_property
    def base_digest(self) -> str:
        """SHA-256 of the model under the adapter, as ``params_digest`` counts it; it never changes."""
        return tensors_digest(self.base_params())

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapter's parameters, by their names in the model."""
        return {name: tuple(p.shape) for name, p in self.model.named_parameters() if p.requires_grad}

    def _adapter(self) -> Adapter:
        """Return the adapter as it is now, by reference."""
        tensors = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return Adapter.from_tensors(tensors, self._config)
