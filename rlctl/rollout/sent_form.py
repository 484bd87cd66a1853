"""The names and shapes in which a trainer sends a model, and what vLLM's loaders make of them.

Trainers send tensors as transformers holds them: experts of a layer in one stack. vLLM's loaders take experts one by
one. Both forms are taken here; what a whole stream has to bring is said in the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlctl.keys.boxes import Box, Shape, extent
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout
from rlctl.sync.errors import MismatchError
from rlctl.sync.tensor_meta import TensorMeta


@dataclass(frozen=True)
class SentForm:
    """One model.

    Attributes:
        metas: name -> what a trainer sends.
        single: the names and shapes that the loaders take.
        parts: name of a trainer's -> the loaders' tensors in it: (name, region, shape).
        aliases: names that may be sent beside the tensor that they are another name of.
    """

    metas: dict[str, TensorMeta]
    single: dict[str, Shape]
    parts: dict[str, list[tuple[str, Box, Shape]]]
    aliases: frozenset[str]

    def split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the loaders take of one tensor of either form, as views. Raises MismatchError for its shape."""
        shape = self.metas[name].shape if name in self.metas else self.single[name]
        if tuple(tensor.shape) != shape:
            raise MismatchError(f"tensor {name} is sent as {tuple(tensor.shape)}, and the engine holds {shape}")
        if name not in self.metas:
            yield name, tensor
            return
        for single, box, wanted in self.parts[name]:
            yield single, tensor[tuple(span.slice for span in box)].reshape(wanted)

    def untouched(self, came: set[str]) -> list[str]:
        """Return the trainer's names of which a part is not in ``came`` (names of the loaders')."""
        return [name for name in self.metas if any(single not in came for single, _, _ in self.parts[name])]


def sent_form(spec: ModelSpec, dtype: str) -> SentForm:
    """Return the form of a model whose weights are of one dtype (a safetensors code)."""
    shapes = canonical_shapes(spec)
    stored = fused_layout(spec, shapes).stored.values()
    written = [one for one in stored if one.written and not one.optional]
    return SentForm(
        {one.ref.name: TensorMeta(one.ref.name, dtype, one.shape) for one in written},
        dict(shapes),
        {one.ref.name: [(part.tensor, part.at, extent(part.box)) for part in one.parts] for one in written},
        frozenset(one.ref.name for one in stored if not one.written),
    )
