"""Bytes of the KV cache, by length and concurrency."""

from __future__ import annotations

from rlctl.keys.model_spec import ModelSpec


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int, *, tp: int = 1) -> int:
    """Return the bytes that one token takes on one rank.

    Ranks share the key and value heads; with more ranks than heads each head is kept several times. Latent attention
    keeps one vector for all heads (DeepSeek-V2, arXiv:2405.04434, section 2.1), on every rank.
    """
    if spec.mla is not None:
        return spec.layers * (spec.mla.kv_rank + spec.mla.rope_dim) * element_bytes
    heads = -(-spec.kv_heads // tp)
    return spec.layers * 2 * heads * spec.head_dim * element_bytes


def embedded_cache_bytes(
    spec: ModelSpec, element_bytes: int, *, slots: int, length: int, threads: int = 1, tp: int = 1
) -> int:
    """Return what the embedded engine's fused decoder sets aside: ``slots`` rows of ``length`` tokens, both padded, on
    each of ``tp`` ranks that share its key-value heads.

    Keys lie at an odd number of 16-column groups, so their rows are up to 16 columns longer than the values'.
    """
    rows = -(-slots // (4 * threads)) * 4 * threads
    width = -(-length // 16) * 16
    stride = width + (16 if width // 16 % 2 == 0 else 0)
    return spec.layers * rows * -(-spec.kv_heads // tp) * spec.head_dim * 2 * stride * element_bytes
