"""The rollout engine of a rank whose replica is several: every rank of it takes the same requests and steps alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from rlctl.errors import UsageError
from rlctl.hybrid.tp.decoder import TensorParallelDecoder
from rlctl.hybrid.tp.group import TensorGroup
from rlctl.hybrid.tp.part import Part
from rlctl.keys.model_spec import ModelSpec
from rlctl.rollout.base import LoadReport
from rlctl.rollout.embedded.choice import Forward
from rlctl.rollout.embedded.decoder import Decoder
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.embedded.fused_weights import fused_shape
from rlctl.sync import boxes
from rlctl.sync.sharding import split_box
from rlctl.sync.weights import Weight, model_weights


class TensorParallelEngine(EmbeddedEngine):
    """One rank of a replica; see ``RolloutEngine``.

    All ranks of the replica make the same calls with the same arguments and get the same outputs. A token's noise is
    that of ``EmbeddedEngine``: in float32 the tokens are those of one process, but where the noise falls within
    rounding of the edge between two tokens. Weights come by ``load_weights``, whole tensors of which this rank keeps
    its part, or by ``adopt``.

    Args:
        model: a transformers configuration of the Llama, Qwen2 or Qwen3 family, or the folder that holds one.
        group: the replica's ranks.
        whole_vocab: keep embedding and head whole on every rank: two collectives a token less, more memory.
        pad: where the ranks do not divide heads or feed-forward, pad the smaller parts with zeros.
        dtype, max_slots, max_length, replica, device: see ``RolloutEngine``.

    Raises:
        UsageError: the model cannot be cut into so many parts.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: TensorGroup,
        dtype: torch.dtype,
        whole_vocab: bool = False,
        pad: bool = False,
        max_slots: int = 64,
        max_length: int = 2048,
        replica: str = "0",
        device: str = "cpu",
    ) -> None:
        if isinstance(model, str | Path):
            model = AutoConfig.from_pretrained(model)
        self._group = group
        self._weight_rules = _rules(model, group.size, pad=pad)
        self._whole_vocab, self._pad = whole_vocab, pad
        super().__init__(model, dtype=dtype, max_slots=max_slots, max_length=max_length, replica=replica, device=device)

    @property
    def group(self) -> TensorGroup:
        """The replica's ranks, and what was said among them."""
        return self._group

    def adopt(self, shards: Mapping[str, Tensor], version: int) -> None:
        """Compute with these tensors, this rank's part of version ``version``; nothing is copied.

        Requests in flight are kept, as by ``load_weights``. An engine whose weights slept is awake after it.

        Args:
            shards: by the local names of the rollout's layout; see ``AdoptedWeights``.
        """
        self._require_open()
        self._requeue()
        assert isinstance(self._decoder, TensorParallelDecoder)
        self._decoder.adopt(shards)
        self._awake.add("weights")
        self._missing, self._version = set(), version
        self._weight_bytes = sum(tensor.nbytes for tensor in shards.values())

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> LoadReport:
        return super().load_weights(self._parts(stream), version)

    def _parts(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        aliases = self._decoder.aliases()
        for name, tensor in stream:
            weight = self._weight_rules.get(aliases.get(name, name))
            whole = weight is not None and tensor.shape == weight.shape
            yield name, self._part_of(weight, tensor) if weight is not None and whole else tensor

    def _part_of(self, weight: Weight, tensor: Tensor) -> Tensor:
        if weight.split.kind == "vocab" and self._whole_vocab:
            return tensor
        rank, size = self._group.rank, self._group.size
        box = split_box(boxes.whole(weight.shape), weight.split, rank, size, 1, weight.name, padded=self._pad)
        part = tensor[boxes.slices(box)]
        if weight.split.kind == "vocab" or not self._pad:
            return part
        first = split_box(boxes.whole(weight.shape), weight.split, 0, size, 1, weight.name, padded=True)
        lacking = [n - m for n, m in zip(boxes.sizes(first), part.shape, strict=True)]
        return F.pad(part, [n for lack in reversed(lacking) for n in (0, lack)])

    def _make_decoder(self, config: Any, forward: Forward, **sizes: Any) -> Decoder:
        shape = fused_shape(config)
        assert shape is not None
        part = Part(shape, self._group.rank, self._group.size, self._whole_vocab)
        sizes.pop("trust_remote_code")
        return TensorParallelDecoder(config, part, self._group, **sizes)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not self._whole_vocab or self._group.size == 1:
            return super()._choose(logits)  # gathered logits have the same bits everywhere
        # Each rank's own product may round otherwise: one of them draws.
        chosen = super()._choose(logits) if self._group.rank == 0 else self._nothing(len(logits))
        return tuple(self._group.firsts(values) for values in chosen)  # type: ignore[return-value]

    def _nothing(self, rows: int) -> tuple[Tensor, Tensor]:
        return (
            torch.zeros(rows, dtype=torch.long, device=self._device),
            torch.zeros(rows, dtype=torch.float32, device=self._device),
        )


def _rules(config: Any, size: int, *, pad: bool) -> dict[str, Weight]:
    """Return a model's weights by name. Raises UsageError when ``size`` ranks cannot share it."""
    if fused_shape(config) is None:
        raise UsageError(
            f"tensor-parallel generation knows the layers of llama, qwen2 and qwen3, not of {type(config).__name__}",
            fix="generate on whole copies, tp_size=1 with another rollout engine, or with vLLM",
        )
    weights = model_weights(ModelSpec.from_config(config.to_dict()), "F32")
    for weight in weights:
        split_box(boxes.whole(weight.shape), weight.split, 0, size, 1, weight.name, padded=pad)
    return {weight.name: weight for weight in weights}
