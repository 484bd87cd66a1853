"""The words that an architecture's table is written in: one row for each tensor that Megatron-core holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How tensor-parallel ranks share a Megatron tensor. "whole": every rank holds all of it. "rows" and "columns": cut
# along dimension 0 or 1. "qkv": query, key and value interleaved by group, cut by groups. "gate_up": each rank holds
# its gate rows above its up rows.
Kind = Literal["whole", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True)
class Row:
    """One Megatron tensor of a layer and the Hugging Face tensors that it is made of.

    Args:
        kind: how it is laid out and sharded.
        megatron: its name under ``decoder.layers.<L>.`` with Transformer Engine modules; ``{e}`` is a local expert.
        hf: names under ``model.layers.<L>.``, one, or three for "qkv", or two for "gate_up"; ``{e}`` is an expert.
        local: its name with Megatron's own ("local") modules, where that differs.
        local_kind: its kind with those modules, where that differs.
    """

    kind: Kind
    megatron: str
    hf: tuple[str, ...]
    local: str = ""
    local_kind: Kind | None = None

    def forms(self) -> dict[str, tuple[str, Kind]]:
        """Return flavour -> (name, kind) for the flavours ``te`` and ``local``."""
        return {
            "te": (self.megatron, self.kind),
            "local": (self.local or self.megatron, self.local_kind or self.kind),
        }


@dataclass(frozen=True)
class Architecture:
    """One architecture's table.

    Args:
        family: the row of ``rlctl.keys.families.FAMILIES`` whose names and shapes these are.
        attention, dense, sparse: rows of every layer, of a dense feed-forward block, of a mixture-of-experts block.
        expert: rows of one routed expert.
        prediction: rows of a multi-token-prediction layer around its attention and experts.
        status: scheme -> how far it is held by tests against the real thing; a scheme that is absent is refused.
    """

    family: str
    attention: tuple[Row, ...] = ()
    dense: tuple[Row, ...] = ()
    sparse: tuple[Row, ...] = ()
    expert: tuple[Row, ...] = ()
    prediction: tuple[Row, ...] = ()
    status: Mapping[str, str] = field(default_factory=dict)


def whole(megatron: str, hf: str, *, local: str = "") -> Row:
    """Return the row of a tensor that every tensor-parallel rank holds."""
    return Row("whole", megatron, (hf,), local)


def linear(kind: Kind, megatron: str, *hf: str, local_kind: Kind | None = None) -> tuple[Row, Row]:
    """Return the rows of a linear module's weight and bias (a bias that the model lacks is passed over).

    The bias of a module that is cut by columns belongs to every rank.
    """
    weight = Row(kind, f"{megatron}.weight", tuple(f"{name}.weight" for name in hf), "", local_kind)
    bias_kind: Kind = "whole" if kind == "columns" else kind
    return weight, Row(bias_kind, f"{megatron}.bias", tuple(f"{name}.bias" for name in hf), "", local_kind)
