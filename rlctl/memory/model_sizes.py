"""Bytes of weights, gradients and optimizer states by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from rlctl.keys.lora.patterns import is_target
from rlctl.keys.model_spec import ModelSpec
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.weight_classes import bytes_by_rank
from rlctl.sync.weights import Split, Weight, model_weights

MASTER_BYTES = 4
"""Bytes of one trained element, and of its gradient: float32."""
MOMENT_BYTES = 8
"""Bytes of AdamW's two moments of one element: float32."""


@dataclass(frozen=True)
class TrainedSizes:
    """What one trainer rank keeps, in bytes.

    Attributes:
        weights: float32 masters of its shard, adapters included.
        gradients: of what is trained there.
        optimizer: moments of what is trained there.
    """

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class ModelSizes:
    """A model in the trainer's and in the rollout's layout.

    Args:
        spec: the model.
        train: the trainer's layout.
        rollout: the rollout's.
        engine_dtype: safetensors code of the rollout engine's weights.
        pad: parts of a replica are padded to the largest.
        lora_rank: of the adapter that is trained; 0 trains all weights.
        lora_targets: the modules that have it, as ``model.lora.target_modules`` names them.
    """

    spec: ModelSpec
    train: ParallelLayout
    rollout: ParallelLayout
    engine_dtype: str
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ("all-linear",)
    pad: bool = False

    @cached_property
    def trained(self) -> list[TrainedSizes]:
        """What each trainer rank keeps."""
        held = _by_rank(self.spec, "F32", self.train, cut_vocabulary=False)
        if not self.lora_rank:
            return [TrainedSizes(n, n, n // MASTER_BYTES * MOMENT_BYTES) for n in held]
        adapter = adapter_elements(self._weights, self.lora_rank) // max(self.train.shard, 1)
        return [TrainedSizes(n + adapter * MASTER_BYTES, adapter * MASTER_BYTES, adapter * MOMENT_BYTES) for n in held]

    @cached_property
    def engine(self) -> list[int]:
        """Bytes of the weights on each rollout rank, all replicas one after the other."""
        layout = replace(one_replica(self.rollout), padded=self.pad)
        parts = list(_by_rank(self.spec, self.engine_dtype, layout))
        return (parts if not self.pad else [max(parts)] * len(parts)) * self.rollout.replicas

    @cached_property
    def summed(self) -> list[int]:
        """Bytes on each rollout rank of the tensors that an adapter is added to; those that an engine keeps in one
        count together."""
        weights = _weights(self.spec, self.engine_dtype)
        kept_in = {w.name: w.fused.module if w.fused else w.name for w in weights}
        adapted = {kept_in[w.name] for w in weights if _has_adapter(w, self.lora_targets)}
        layout = one_replica(self.rollout)
        found = bytes_by_rank([w for w in weights if kept_in[w.name] in adapted], layout)
        return [int(n) for n in found] * self.rollout.replicas

    @cached_property
    def matrix_elements(self) -> int:
        """Elements of all matrices of the whole model that a product takes (a lookup in the embedding is none)."""
        return sum(
            w.elements for w in self._weights if len(w.shape) > 1 and (self.spec.tied or "embed_tokens" not in w.name)
        )

    @cached_property
    def largest_block(self) -> int:
        """Elements of the largest decoder layer, which FSDP gathers whole."""
        layers: dict[int, int] = {}
        for weight in self._weights:
            if weight.layer is not None:
                layers[weight.layer] = layers.get(weight.layer, 0) + weight.elements
        return max(layers.values(), default=0)

    @cached_property
    def outer_elements(self) -> int:
        """Elements of embedding, head and last norm, which FSDP gathers as one group and keeps for the whole pass."""
        return sum(weight.elements for weight in self._weights if weight.layer is None)

    @property
    def _weights(self) -> list[Weight]:
        return _weights(self.spec, "F32")


@cache
def _weights(spec: ModelSpec, dtype: str) -> list[Weight]:
    return model_weights(spec, dtype)


@cache
def _by_rank(spec: ModelSpec, dtype: str, layout: ParallelLayout, *, cut_vocabulary: bool = True) -> tuple[int, ...]:
    weights = _weights(spec, dtype)
    if not cut_vocabulary:  # the trainer's tensor parallelism leaves embedding and head whole
        weights = [replace(w, split=Split()) if w.split.kind == "vocab" else w for w in weights]
    return tuple(int(n) for n in bytes_by_rank(weights, layout))


def one_replica(layout: ParallelLayout) -> ParallelLayout:
    """Return one replica of a rollout layout: all are alike, and a thousand are not counted one by one."""
    return ParallelLayout.vllm(tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep > 1, layers=layout.layers)


def _has_adapter(weight: Weight, targets: tuple[str, ...]) -> bool:
    """Whether ``target_modules`` put an adapter on a weight."""
    path, _, kind = weight.name.rpartition(".")
    if kind != "weight" or len(weight.shape) < 2:
        return False
    return weight.layer is not None if targets == ("all-linear",) else is_target(path, targets)


def adapter_elements(weights: Sequence[Weight], rank: int) -> int:
    """Return the elements of an adapter of ``rank`` on every linear layer but the head."""
    return sum(
        rank * sum(weight.shape)
        for weight in weights
        if weight.layer is not None and len(weight.shape) == 2 and "norm" not in weight.name
    )
