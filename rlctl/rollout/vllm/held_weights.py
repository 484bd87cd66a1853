"""One worker's share of a model under Hugging Face names: views of vLLM's own parameters, where they are plain.

vLLM fuses query, key and value, gate and up, adds rows to the embedding, and cuts all of it over tensor-parallel
ranks. A tensor of the stream is so a region of one of its parameters, and that region of the parameter is a region of
the tensor: writing is a copy, and reading back shows what the engine really computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlctl.errors import RlctlError, UnavailableError
from rlctl.keys.boxes import Box, Shape
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.schemes.hf import canonical_shapes
from rlctl.keys.schemes.vllm import vllm_layout
from rlctl.sync.protocols import LoadReport
from rlctl.sync.targets import matching
from rlctl.sync.tensor_meta import TensorMeta


@dataclass(frozen=True)
class Region:
    """``box`` of a tensor is ``view`` of a parameter."""

    box: Box
    view: torch.Tensor


@dataclass
class HeldWeights:
    """Where each tensor of a stream goes.

    Attributes:
        metas: name -> what the whole tensor is.
        regions: name -> the parts of it that this worker holds; none for what only others hold.
        aliases: other names of a stream that mean one of these (a tied head).
    """

    metas: dict[str, TensorMeta]
    regions: dict[str, list[Region]]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def views(self) -> dict[str, torch.Tensor] | None:
        """Name -> tensor, when this worker holds every tensor whole, else None."""
        found = {}
        for name, meta in self.metas.items():
            regions = self.regions[name]
            if len(regions) != 1 or tuple(regions[0].view.shape) != meta.shape:
                return None
            found[name] = regions[0].view
        return found

    def load(self, stream: Iterable[tuple[str, torch.Tensor]], *, cast: bool = False) -> LoadReport:
        """Write what this worker holds of each tensor. Raises MismatchError for another shape, or (unless ``cast``)
        another dtype."""
        loaded, unknown = list[str](), list[str]()
        for name, tensor in stream:
            known = self.aliases.get(name, name)
            if known not in self.metas:
                unknown.append(name)
                continue
            meta = TensorMeta.of(name, tensor)
            shape, dtype = self.metas[known].shape, self.regions[known][0].view.dtype if self.regions[known] else None
            matching(meta, torch.empty(shape, dtype=dtype or tensor.dtype, device="meta"), cast=cast)
            for region in self.regions[known]:
                region.view.copy_(tensor[tuple(span.slice for span in region.box)])
            loaded.append(name)
        done = {self.aliases.get(name, name) for name in loaded}
        return LoadReport(loaded, unknown, [name for name in self.metas if name not in done])

    def read(self, name: str) -> Iterator[Region]:
        """Yield the parts of a tensor that this worker holds. Raises RlctlError for a name that it does not know."""
        if name not in self.regions:
            raise RlctlError(f"the engine holds no tensor {name}")
        yield from self.regions[name]


def held_weights(model: Any, config: Mapping[str, Any], *, rank: int = 0, world: int = 1) -> HeldWeights:
    """Return where the tensors of a stream go in the parameters of vLLM's ``model``.

    Args:
        model: what a vLLM worker runs.
        config: its Hugging Face configuration.
        rank: of this worker among ``world`` tensor-parallel ones.
        world: how many there are.

    Raises:
        UsageError: the architecture's parameters are not known.
        UnavailableError: a parameter is not what it is known to be: missing, packed, of another shape.
    """
    spec = ModelSpec.from_config(config)
    shapes = canonical_shapes(spec)
    layout = vllm_layout(spec, shapes, tp=world)
    shard = f"rank_{rank}" if world > 1 else ""
    # With adapters enabled, vLLM's LoRA layers stand around those of the base.
    parameters = {name.replace(".base_layer.", "."): one for name, one in model.named_parameters()}
    stored = {ref.name: one for ref, one in layout.stored.items() if ref.shard == shard and one.written}
    odd = sorted(stored.keys() ^ parameters.keys())
    odd += [name for name, one in stored.items() if name in parameters and _shape(parameters[name]) != one.shape]
    if odd:
        held = f"{_shape(parameters[odd[0]])}" if odd[0] in parameters else "missing"
        known = f"{stored[odd[0]].shape}" if odd[0] in stored else "not known"
        raise UnavailableError(f"{len(odd)} parameters are not plain: {odd[0]} is {held} and should be {known}")
    regions: dict[str, list[Region]] = {name: [] for name in shapes}
    dtypes: dict[str, str] = {}
    for name, one in stored.items():
        data = parameters[name].data
        for part in one.parts:
            view = data[tuple(span.slice for span in part.at)]
            regions[part.tensor].append(Region(part.box, view))
            dtypes[part.tensor] = dtype_code(data.dtype)
    common = next(iter(dtypes.values()))
    metas = {name: TensorMeta(name, dtypes.get(name, common), shape) for name, shape in shapes.items()}
    aliases = {
        ref.name: one.parts[0].tensor for ref, one in layout.stored.items() if ref.shard == shard and not one.written
    }
    return HeldWeights(metas, regions, aliases)


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape)
