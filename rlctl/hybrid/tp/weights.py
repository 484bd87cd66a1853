"""A rank's weights, taken over as they are: what a reshard made is what the products read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.rollout.embedded.fused_weights import FusedShape, FusedWeights

_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""First of the weights that lie behind one another -> the name of all of them, as vLLM has it."""


class AdoptedWeights(FusedWeights):
    """Weights that are somebody's tensors; nothing is copied.

    Args:
        shape: sizes of this rank's share.
        shards: by the local names of a ``fused`` layout: ``...qkv_proj.weight``, ``...gate_up_proj.weight``, else the
            weights' own. What there is beyond the model's weights is left alone.

    Raises:
        RlctlError: one is missing, or has another shape.
    """

    def __init__(self, shape: FusedShape, shards: Mapping[str, Tensor]) -> None:
        first = next(iter(shards.values()))
        self._shards = shards
        super().__init__(shape, first.dtype, str(first.device))

    def _fuse(self, names: list[str]) -> Tensor:
        rows = [self._shapes[name][0] for name in names]
        wanted = (sum(rows), *self._shapes[names[0]][1:])
        name = _local_name(names[0])
        shard = self._shards.get(name)
        if shard is None or shard.shape != wanted:
            found = "missing" if shard is None else f"{list(shard.shape)}"
            raise RlctlError(f"a rank's part of {name} is {found}, its model wants {list(wanted)}")
        self.named.update(zip(names, shard.split(rows), strict=True))
        return shard


def _local_name(name: str) -> str:
    head, _, kind = name.rpartition(".")
    before, _, module = head.rpartition(".")
    return f"{before}.{_FUSED[module]}.{kind}" if module in _FUSED else name


def apart(shards: Mapping[str, Tensor], others: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the shards, those copied that lie in the memory of ``others``, which is about to be emptied."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others if tensor.numel()}
    return {
        name: shard.clone() if shard.untyped_storage().data_ptr() in taken else shard for name, shard in shards.items()
    }
