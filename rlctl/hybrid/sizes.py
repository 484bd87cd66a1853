"""Sizes that do not divide: which tensor-parallel sizes a model and a number of ranks have, and what padding to another
one would cost. Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.errors import Finding, FindingsError
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.model_spec import ModelSpec
from rlctl.units import format_bytes


@dataclass(frozen=True)
class Padding:
    """A model made wider with zeros until it can be cut, which changes no output.

    Attributes:
        tp: parts.
        heads, kv_heads, ffn, vocab: as padded.
        elements: parameters that are added; ``share`` of the model's.
        nbytes: their bytes, over all parts.
        idle: ranks that are left over.
    """

    tp: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    elements: int
    share: float
    nbytes: int
    idle: int

    def __str__(self) -> str:
        left = f", {self.idle} ranks idle" if self.idle else ""
        return f"{format_bytes(self.nbytes)} of zeros ({self.share:.1%}){left}"


def valid_sizes(spec: ModelSpec, world: int) -> list[int]:
    """Return the tensor-parallel sizes that divide ``world`` ranks and into which a model can be cut."""
    return [tp for tp in range(1, world + 1) if world % tp == 0 and not _uneven(spec, tp)]


def check_sizes(spec: ModelSpec, tp: int, world: int, *, pads: bool = False) -> None:
    """Refuse a tensor-parallel size that does not fit. ``pads``: its parts can be padded, when that is asked for.

    Raises:
        FindingsError: all that does not divide, with the sizes that are valid and what padding would cost.
    """
    found = [f"tp {tp} does not divide the {number} {name}" for name, number in _uneven(spec, tp).items()]
    if world % tp:
        found.append(f"tp {tp} does not divide the {world} ranks")
    if found:
        fix = f"valid here: {', '.join(map(str, valid_sizes(spec, world)))}"
        fix += "; or pad=True" if pads and not world % tp else ""
        cost = padding(spec, tp, world)
        title = f"tensor parallelism {tp} on {world} ranks would take {cost}"
        raise FindingsError(title, [Finding(fault, fix=fix) for fault in found])


def padding(spec: ModelSpec, tp: int, world: int, dtype: str = "BF16") -> Padding:
    """Return what making a model divisible by ``tp`` costs.

    Key and value heads that are fewer than the parts are repeated where that comes out even, and padded where it does
    not; query heads follow them, so that each keeps its own. ``dtype``: safetensors code that bytes are counted in.
    """
    kv_heads = spec.kv_heads if _kv_fits(spec, tp) else _up(spec.kv_heads, tp)
    heads = _up(spec.heads // spec.kv_heads * kv_heads, tp)
    ffn, vocab = _up(spec.ffn, tp), _up(spec.vocab, tp)
    sparse = len(spec.moe_layers)
    expert = _up(spec.moe_ffn, tp) - spec.moe_ffn if spec.experts else 0
    attention = (2 * (heads - spec.heads) + 2 * (kv_heads - spec.kv_heads)) * spec.head_dim * spec.hidden
    dense = 3 * (ffn - spec.ffn) * spec.hidden
    routed = 3 * expert * spec.hidden * spec.experts
    ends = (vocab - spec.vocab) * spec.hidden * (1 if spec.tied else 2)
    added = spec.layers * attention + (spec.layers - sparse) * dense + sparse * routed + ends
    width = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim * spec.hidden
    whole = spec.layers * width + (spec.layers - sparse) * 3 * spec.ffn * spec.hidden
    whole += sparse * 3 * spec.moe_ffn * spec.hidden * spec.experts + spec.vocab * spec.hidden * (1 if spec.tied else 2)
    return Padding(tp, heads, kv_heads, ffn, vocab, added, added / whole, dtype_nbytes(dtype, added), world % tp)


def _uneven(spec: ModelSpec, tp: int) -> dict[str, int]:
    sizes = {"attention heads": spec.heads}
    if len(spec.moe_layers) < spec.layers:
        sizes["rows of the feed-forward layers"] = spec.ffn
    if spec.experts:
        sizes["rows of an expert"] = spec.moe_ffn
    found = {name: number for name, number in sizes.items() if number % tp}
    if not _kv_fits(spec, tp):
        found["key-value heads"] = spec.kv_heads
    return found


def _kv_fits(spec: ModelSpec, tp: int) -> bool:
    return spec.mla is not None or spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
