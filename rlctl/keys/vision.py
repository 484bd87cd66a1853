"""The vision towers of Qwen2.5-VL and Qwen3-VL: their sizes, and the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlctl.keys.config_reader import ConfigReader

VisionKind = Literal["qwen2_5_vl", "qwen3_vl"]
Named = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class VisionTower:
    """Sizes of a vision tower.

    Attributes:
        kind: whose names it bears.
        depth, hidden, ffn, out: layers, width, feed-forward width, and width of the language model it feeds.
        channels, temporal_patch, patch: a patch is (channels, temporal_patch, patch, patch).
        merge: sides of the square of patches that become one token.
        positions: learned positions (Qwen3-VL), else 0.
        deepstack: layers whose features go deeper into the language model (Qwen3-VL).
    """

    kind: VisionKind
    depth: int
    hidden: int
    ffn: int
    out: int
    channels: int
    temporal_patch: int
    patch: int
    merge: int
    positions: int = 0
    deepstack: tuple[int, ...] = ()


def read_vision(reader: ConfigReader, kind: VisionKind) -> VisionTower | None:
    """Return the tower that ``vision_config`` describes; its absence is a fault of ``reader``, and None."""
    section = reader.section("vision_config")
    if section is None:
        reader.fault("vision_config is missing")
        return None
    own_positions = kind == "qwen3_vl"
    return VisionTower(
        kind=kind,
        depth=section.integer("depth", high=4096),
        hidden=section.integer("hidden_size"),
        ffn=section.integer("intermediate_size"),
        out=section.integer("out_hidden_size"),
        channels=section.integer("in_channels", "in_chans", default=3, high=1024),
        temporal_patch=section.integer("temporal_patch_size", default=2, high=1024),
        patch=section.integer("patch_size", high=1 << 16),
        merge=section.integer("spatial_merge_size", default=2, high=1024),
        positions=section.integer("num_position_embeddings") if own_positions else 0,
        deepstack=section.integers("deepstack_visual_indexes")[:4096] if own_positions else (),
    )


def vision_shapes(tower: VisionTower) -> Named:
    """Yield name (without the tower's own prefix) and shape of every tensor."""
    learned = tower.kind == "qwen3_vl"  # biases on patches and norms, learned positions
    patch = (tower.hidden, tower.channels, tower.temporal_patch, tower.patch, tower.patch)
    yield "patch_embed.proj.weight", patch
    if learned:
        yield "patch_embed.proj.bias", (tower.hidden,)
        yield "pos_embed.weight", (tower.positions, tower.hidden)
    for layer in range(tower.depth):
        block = f"blocks.{layer}."
        yield from _norm(f"{block}norm1", tower.hidden, bias=learned)
        yield from _norm(f"{block}norm2", tower.hidden, bias=learned)
        yield from _linear(f"{block}attn.qkv", 3 * tower.hidden, tower.hidden)
        yield from _linear(f"{block}attn.proj", tower.hidden, tower.hidden)
        if learned:
            yield from _linear(f"{block}mlp.linear_fc1", tower.ffn, tower.hidden)
            yield from _linear(f"{block}mlp.linear_fc2", tower.hidden, tower.ffn)
        else:
            yield from _linear(f"{block}mlp.gate_proj", tower.ffn, tower.hidden)
            yield from _linear(f"{block}mlp.up_proj", tower.ffn, tower.hidden)
            yield from _linear(f"{block}mlp.down_proj", tower.hidden, tower.ffn)
    merged = tower.hidden * tower.merge**2
    if learned:
        yield from _merger("merger", tower.hidden, merged, tower.out)
        for index in range(len(tower.deepstack)):
            yield from _merger(f"deepstack_merger_list.{index}", merged, merged, tower.out)
    else:
        yield "merger.ln_q.weight", (tower.hidden,)
        yield from _linear("merger.mlp.0", merged, merged)
        yield from _linear("merger.mlp.2", tower.out, merged)


def _merger(name: str, normed: int, merged: int, out: int) -> Named:
    yield from _norm(f"{name}.norm", normed, bias=True)
    yield from _linear(f"{name}.linear_fc1", merged, merged)
    yield from _linear(f"{name}.linear_fc2", out, merged)


def _linear(name: str, out: int, into: int) -> Named:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def _norm(name: str, width: int, *, bias: bool) -> Named:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)
