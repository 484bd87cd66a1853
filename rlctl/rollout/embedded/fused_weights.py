"""Weights of the Llama, Qwen2 and Qwen3 families, laid out for few large products, and which models those are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.initialization import no_init_weights

from rlctl.model_making import ONE_AT_A_TIME

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class FusedShape:
    """Sizes of a model that the fused forward can run.

    Attributes:
        layers, hidden, ffn, vocab: numbers of layers, of features of the residual stream, of the MLP, of token ids.
        heads, kv_heads, head_dim: query heads, key/value heads, features of one head.
        eps: of the RMS norms.
        qk_norm: whether queries and keys are normalised per head.
        tied: whether the embedding is the output projection too.
        biases: which of qkv, o, mlp have biases.
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool
    tied: bool
    biases: frozenset[str]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every weight, as transformers names them (a tied head is not listed)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            linears = [
                ("self_attn.q_proj", "qkv", q, self.hidden),
                ("self_attn.k_proj", "qkv", kv, self.hidden),
                ("self_attn.v_proj", "qkv", kv, self.hidden),
                ("self_attn.o_proj", "o", self.hidden, q),
                ("mlp.gate_proj", "mlp", self.ffn, self.hidden),
                ("mlp.up_proj", "mlp", self.ffn, self.hidden),
                ("mlp.down_proj", "mlp", self.hidden, self.ffn),
            ]
            for name, group, out, width in linears:
                shapes[f"{at}.{name}.weight"] = (out, width)
                if group in self.biases:
                    shapes[f"{at}.{name}.bias"] = (out,)
            if self.qk_norm:
                shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


def fused_shape(config: Any) -> FusedShape | None:
    """Return the sizes when the fused forward computes exactly what transformers would, else None.

    Anything not known to be covered (sliding windows, other activations or position encodings, quantised weights,
    another class behind the configuration, a weight more or less than expected) gives None.
    """
    if type(config) not in (LlamaConfig, Qwen2Config, Qwen3Config) or getattr(config, "auto_map", None):
        return None
    if getattr(config, "quantization_config", None) is not None or config.hidden_act != "silu":
        return None
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return None
    qwen2 = type(config) is Qwen2Config
    attention_bias = getattr(config, "attention_bias", False)
    shape = FusedShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        qk_norm=type(config) is Qwen3Config,
        tied=bool(config.tie_word_embeddings),
        biases=frozenset(
            name
            for name, has in (
                ("qkv", qwen2 or attention_bias),
                ("o", attention_bias and not qwen2),
                ("mlp", getattr(config, "mlp_bias", False)),
            )
            if has
        ),
    )
    with ONE_AT_A_TIME, no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    actual = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return shape if actual == shape.parameter_shapes() else None


@dataclass(frozen=True)
class LayerWeights:
    """One layer: ``qkv`` [(heads + 2 kv_heads) * head_dim, hidden], ``o`` [hidden, heads * head_dim], ``gate_up``
    [2 ffn, hidden], ``down`` [hidden, ffn]; biases and the norms of queries and keys where the model has them."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedWeights:
    """Every weight of a model, uninitialised, with views named as transformers names them.

    Args:
        shape: sizes of the model.
        dtype: of all weights.
        device: where they live.
    """

    def __init__(self, shape: FusedShape, dtype: torch.dtype, device: str) -> None:
        self.named: dict[str, Tensor] = {}
        self._shapes = shape.parameter_shapes()
        self._dtype, self._device = dtype, device
        self.embed = self._weight("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{layer}") for layer in range(shape.layers)]
        self.norm = self._weight("model.norm.weight")
        self.head = self.embed if shape.tied else self._weight("lm_head.weight")

    def _layer(self, at: str) -> LayerWeights:
        qkv = [f"{at}.self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{at}.mlp.{name}_proj" for name in ("gate", "up")]
        return LayerWeights(
            norm=self._weight(f"{at}.input_layernorm.weight"),
            qkv=self._fuse([f"{name}.weight" for name in qkv]),
            qkv_bias=self._maybe([f"{name}.bias" for name in qkv]),
            q_norm=self._maybe([f"{at}.self_attn.q_norm.weight"]),
            k_norm=self._maybe([f"{at}.self_attn.k_norm.weight"]),
            o=self._weight(f"{at}.self_attn.o_proj.weight"),
            o_bias=self._maybe([f"{at}.self_attn.o_proj.bias"]),
            mlp_norm=self._weight(f"{at}.post_attention_layernorm.weight"),
            gate_up=self._fuse([f"{name}.weight" for name in gate_up]),
            gate_up_bias=self._maybe([f"{name}.bias" for name in gate_up]),
            down=self._weight(f"{at}.mlp.down_proj.weight"),
            down_bias=self._maybe([f"{at}.mlp.down_proj.bias"]),
        )

    def _weight(self, name: str) -> Tensor:
        return self._fuse([name])

    def _maybe(self, names: list[str]) -> Tensor | None:
        return self._fuse(names) if names[0] in self._shapes else None

    def _fuse(self, names: list[str]) -> Tensor:
        rows = [self._shapes[name][0] for name in names]
        fused = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        self.named.update(zip(names, fused.split(rows), strict=True))
        return fused
