"""LoRA on FSDP2: base and adapter are spread over the ranks, and the adapter alone is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl.experience.rows import Floats, Row
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.export import entries, export_adapter
from rlctl.keys.lora.merge import Merger
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.lora.names import Part, parse_key
from rlctl.keys.model_spec import ModelSpec
from rlctl.model.adapting import add_adapter, base_name
from rlctl.model.bare_base import switched_off
from rlctl.model.base_reference import write_base
from rlctl.model.beginning import begin_with
from rlctl.model.digest import ordered_digest, tensors_digest
from rlctl.model.fsdp2.engine import Fsdp2Engine
from rlctl.model.locate import find_adapter
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig


class Fsdp2LoraEngine(Fsdp2Engine):
    """One rank of a model whose adapter is trained; a whole adapter is gathered where one is needed.

    Args:
        model, optimizer, more: see ``Fsdp2Engine``; ``tp`` is 1.
        lora, seed, base: see ``LoraEngine``.

    Raises:
        UsageError, FindingsError, UnavailableError: see ``LoraEngine``.
    """

    def __init__(
        self, model: Any, optimizer: OptimizerConfig, *, lora: LoraConfig, seed: int, base: str, **more: Any
    ) -> None:
        self._lora, self._seed, self._base = lora, seed, base_name(base)
        if dist.get_rank() == 0:  # the others are given its values
            config = add_adapter(model, lora, seed=seed, base=self._base)
            if lora.adapter is not None:
                named = dict(model.named_parameters())
                own = Adapter.from_tensors({n: p.detach() for n, p in named.items() if p.requires_grad}, config)
                bare = ((key.parameter, p) for n, p in named.items() if (key := parse_key(n)).part is Part.BASE)
                folder = find_adapter(lora.adapter)
                begin_with(folder, own, model=self._base, base_digest=tensors_digest(bare))
        super().__init__(model, optimizer, **more)
        shapes = {name: tuple(self.shards.shape(raw)) for raw, name in self._base_names.items()}
        tied = bool(self.model.config.get_text_config().tie_word_embeddings)
        stacked = self.adapter_config.target_parameters
        experts = ModelSpec.from_config(self.model.config.to_dict()).moe if stacked else None
        on_meta = {name: torch.empty(self.shards.shape(name), device="meta") for name in self.shards.trained()}
        contents = Adapter.from_tensors(on_meta, self.adapter_config).contents
        self._plan = plan_merge(contents, self.adapter_config, shapes, tied=tied, moe=experts)

    adapter_config: AdapterConfig

    def base_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        """Return what ``log_probs`` would without the adapter."""
        with switched_off(self.model):
            return self.log_probs(rows, temperature=temperature)

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights with the adapter folded in; see ``LoraEngine``."""
        dtype = self._passes.dtype
        merger = Merger(self._adapter(), self._plan, dtype=dtype)
        for raw, name in self._base_names.items():
            changed = name in self._plan.changes
            whole = self._whole(raw, self.shards.local(raw), None if changed else dtype)
            yield name, merger.tensor(name, whole).to(dtype)

    def adapter_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter alone, in float32, under the names of PEFT's files."""
        return entries(self._adapter(), "peft-file")

    def base_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model without the adapter, in float32, under transformers names; tied copies left out."""
        for raw, name in self._base_names.items():
            yield name, self._whole(raw, self.shards.local(raw))

    def base_and_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts in float32, as they lie here: the base's under transformers names, the adapter's
        under its names in the model. The layout is ``sync.layout.ParallelLayout.fsdp(ranks)``."""
        for raw in self.shards.names():
            yield self._base_names.get(raw, raw), self._parking.values(self.shards.local(raw))

    def save_pretrained(self, folder: Path) -> None:
        """Write the adapter, and what model it belongs to; see ``LoraEngine``."""
        adapter, digest = self._adapter(), self.base_digest
        if dist.get_rank() == 0:
            export_adapter(adapter, folder, "peft-file")
            write_base(folder, self._base, digest)

    @cached_property
    def base_digest(self) -> str:
        """See ``LoraEngine``."""
        raws = sorted(self._base_names, key=self._base_names.__getitem__)
        return ordered_digest((self._base_names[raw], self._whole(raw, self.shards.local(raw))) for raw in raws)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the adapter's parameters, by their names in the model."""
        return {name: tuple(self.shards.shape(name)) for name in self.shards.trained()}

    @cached_property
    def _base_names(self) -> dict[str, str]:
        """Parameter of the model with the adapter in it -> name in the model without, of what is not the adapter's."""
        keys = ((raw, parse_key(raw)) for raw in self.shards.names())
        return {raw: key.parameter for raw, key in keys if key.part is Part.BASE}

    def _adapt(self, twin: Any) -> None:
        self.adapter_config = add_adapter(twin, self._lora, seed=self._seed, base=self._base)

    def _adapter(self) -> Adapter:
        """Return the whole adapter as it is now."""
        tensors = {name: self._whole(name, self.shards.local(name)) for name in self.shards.trained()}
        return Adapter.from_tensors(tensors, self.adapter_config)
