"""What a layout must know of a weight: how tensor parallelism may cut it, and where engines keep it.

The names and shapes are those on disk (one tensor per expert); the rules are those of Megatron-Core, transformers'
tensor-parallel plans and vLLM, which agree: column layers on dim 0, row layers on dim 1, heads never torn, key and
value heads repeated when there are fewer of them than ranks. A vision tower stays whole on every rank of the first
stage, as vLLM keeps it with ``mm_encoder_tp_mode="data"``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Literal

from rlctl.errors import UsageError
from rlctl.keys.dtypes import dtype_nbytes
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import stays_float32, tensor_shapes

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_VISION = re.compile(r"(model\.)?visual\.")


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a tensor.

    Attributes:
        kind: ``whole`` not at all; ``even`` into blocks of whole units; ``kv`` the same, but with more ranks than units
            each unit goes to several ranks; ``vocab`` rows after padding.
        dim: the dimension that is cut.
        units: indivisible parts along it: heads, or single rows.
        groups: of query heads, by their key-value head: when parts are padded, a group stays together, or is cut over
            ranks that all have its key-value head. 0: units have no groups.
    """

    kind: Literal["whole", "even", "kv", "vocab"] = "whole"
    dim: int = 0
    units: int = 1
    groups: int = 0


@dataclass(frozen=True)
class Fused:
    """Where vLLM keeps a weight: in ``module`` instead of its own, behind the parts of ``before`` (split, size)."""

    module: str
    before: tuple[tuple[Split, int], ...] = ()


@dataclass(frozen=True)
class Weight:
    """One tensor of a model.

    Attributes:
        name, shape, dtype: on disk; dtype is a safetensors code.
        split: how tensor parallelism cuts it.
        layer: its decoder layer, or None.
        expert: index of the routed expert it belongs to, or None; ``experts`` of them are in the layer.
        stacked: its first dimension is the experts (models whose files hold all experts in one tensor).
        ends: for pipelines: on the ``first`` stage, the ``last``, or ``both`` (a tied embedding).
        fused: where vLLM keeps it, when not under its own name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: Split = Split()
    layer: int | None = None
    expert: int | None = None
    experts: int = 0
    stacked: bool = False
    ends: Literal["first", "last", "both"] | None = None
    fused: Fused | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return dtype_nbytes(self.dtype, self.elements)


def model_weights(spec: ModelSpec, dtype: str | None = None, *, mtp: bool = False) -> list[Weight]:
    """Return every weight of a model, in the order of its file, each layer's beside each other.

    Args:
        spec: the model.
        dtype: safetensors code of the weights that travel; default: the configuration's own.
        mtp: with the multi-token-prediction layers.
    """
    chosen = dtype or spec.dtype
    if chosen is None:
        raise UsageError("the configuration names no dtype", fix="say in which one the weights travel")
    found = []
    for name, shape in tensor_shapes(spec, mtp=mtp).items():
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        stacked = spec.moe is not None and not spec.moe.parts and ".experts." in name
        if _VISION.match(name):
            found.append(Weight(name, shape, chosen, ends="first"))
            continue
        found.append(
            Weight(
                name=name,
                shape=shape,
                dtype="F32" if stays_float32(name) else chosen,
                split=_split(spec, name, shape),
                layer=int(layer[1]) if layer else None,
                expert=int(expert[1]) if expert else None,
                experts=spec.experts if expert or stacked else 0,
                stacked=stacked,
                ends=_ends(spec, name) if layer is None else None,
                fused=_fused(spec, name),
            )
        )
    return found


def _split(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Split:
    *_, module, kind = name.split(".")
    if spec.moe is not None and not spec.moe.parts and ".experts." in name:
        return _stacked_split(spec, kind)
    bias = kind == "bias"
    if kind == "sinks":
        return Split("even", 0, spec.heads)
    if module in ("embed_tokens", "lm_head", "head"):
        return Split("vocab", 0, shape[0])
    groups = 0 if spec.mla is not None else spec.kv_heads
    if module in ("q_proj", "q_b_proj", "kv_b_proj"):
        return Split("even", 0, spec.heads, groups)
    if module in ("k_proj", "v_proj"):
        return Split("kv", 0, spec.kv_heads)
    if module == "o_proj":
        return Split() if bias else Split("even", 1, spec.heads, groups)
    if module in ("gate_proj", "up_proj", "w1", "w3"):
        return Split("even", 0, shape[0])
    if module in ("down_proj", "w2"):
        return Split() if bias else Split("even", 1, shape[1])
    return Split()


def _stacked_split(spec: ModelSpec, kind: str) -> Split:
    # (E, in, out): gate and up are mixed on the last dimension, so a unit is one pair of columns.
    wide = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}
    return Split("even", wide[kind], spec.moe_ffn) if kind in wide else Split()


def _ends(spec: ModelSpec, name: str) -> Literal["first", "last", "both"]:
    if ".embed_tokens." in name:
        return "both" if spec.tied else "first"
    return "last"


def _fused(spec: ModelSpec, name: str) -> Fused | None:
    head, _, kind = name.rpartition(".")
    prefix, _, module = head.rpartition(".")
    if ".experts." in name:
        return None if spec.moe is None or not spec.moe.parts else _fused_expert(spec, name, module)
    if module in ("q_proj", "k_proj", "v_proj") and spec.mla is None:
        query = (Split("even", 0, spec.heads, spec.kv_heads), spec.heads * spec.head_dim)
        key = (Split("kv", 0, spec.kv_heads), spec.kv_heads * spec.head_dim)
        before = {"q_proj": (), "k_proj": (query,), "v_proj": (query, key)}[module]
        return Fused(f"{prefix}.qkv_proj.{kind}", before)
    if module in ("q_a_proj", "kv_a_proj_with_mqa") and spec.mla is not None and spec.mla.q_rank is not None:
        before = ((Split(), spec.mla.q_rank),) if module == "kv_a_proj_with_mqa" else ()
        return Fused(f"{prefix}.fused_qkv_a_proj.{kind}", before)
    if module in ("gate_proj", "up_proj"):
        width = spec.shared_ffn if ".shared_expert" in name else spec.ffn
        before = ((Split("even", 0, width), width),) if module == "up_proj" else ()
        return Fused(f"{prefix}.gate_up_proj.{kind}", before)
    return None


def _fused_expert(spec: ModelSpec, name: str, module: str) -> Fused:
    block = name[: name.index(".experts.")]
    assert spec.moe is not None
    gate, up, _ = spec.moe.parts
    width = (Split("even", 0, spec.moe_ffn), spec.moe_ffn)
    if module in (gate, up):
        return Fused(f"{block}.experts.routed_experts.w13_weight", (width,) if module == up else ())
    return Fused(f"{block}.experts.routed_experts.w2_weight")
