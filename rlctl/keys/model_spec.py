"""A model's architecture as typed numbers, read from its config.json. No torch, no transformers, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.keys.config_reader import ConfigReader
from rlctl.keys.dtypes import parse_dtype
from rlctl.keys.families import ALIASES, FAMILIES, BiasRule, Experts, Family, known_model_types
from rlctl.keys.json_file import read_object
from rlctl.keys.vision import VisionTower, read_vision
from rlctl.registry import suggest

MAX_LAYERS = 4096
MAX_EXPERTS = 16384
MAX_EXPERT_TENSORS = 4 << 20  # a hostile configuration must not make us list tensors for ever
CONFIG_BYTES = 4 << 20


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head widths of multi-head latent attention (DeepSeek-V2 report, arXiv:2405.04434, section 2.1).

    ``q_rank`` None means one full query projection (``q_proj``).
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the names and shapes of a model's weights follow from.

    Attributes:
        model_type: as config.json says it.
        family: the row of ``FAMILIES`` it follows (``kimi_k2`` follows ``deepseek_v3``).
        architecture: the transformers class, as the configuration names it, else the family's own.
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab: sizes; ``head_dim`` is the width of one query and key
            head, ``ffn`` that of a dense feed-forward layer.
        tied: the output head is the embedding (no ``lm_head.weight`` on disk).
        qkv_bias, o_bias, mlp_bias, qk_norm, sinks: which optional tensors exist.
        experts: routed experts in a sparse layer, 0 for a dense model; ``experts_per_token`` of them run.
        moe_ffn: width of one routed expert; ``shared_ffn`` the total width of the always-active one(s).
        moe_layers: indices of the sparse layers.
        mla: latent attention, or None.
        vision: the vision tower of a vision-language model, or None.
        mtp_layers: multi-token-prediction layers that the published checkpoint holds after the last layer.
        dtype: safetensors code of the configuration's dtype, or None when it names none.
    """

    model_type: str
    family: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    mla: LatentAttention | None = None
    vision: VisionTower | None = None
    mtp_layers: int = 0
    dtype: str | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config.json") -> ModelSpec:
        """Return the spec of a parsed config.json.

        Raises UsageError for a model_type that is not known, FindingsError listing every missing or wrong value.
        """
        reader = ConfigReader(config, where)
        model_type = reader.text("model_type")
        reader.check()
        family_name = _family_name(model_type, where)
        family = FAMILIES[family_name]
        spec = _read(reader, str(model_type), family_name, family)
        reader.check()
        return spec

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelSpec:
        """Return the spec of the config.json in ``folder`` (or of that file itself)."""
        path = Path(folder)
        return cls.from_file(path if path.name.endswith(".json") else path / "config.json")

    @classmethod
    def from_file(cls, path: Path) -> ModelSpec:
        """Return the spec of the configuration file ``path``. Raises JsonError when it cannot be read."""
        return cls.from_config(read_object(path, limit=CONFIG_BYTES), where=str(path))

    @property
    def moe(self) -> Experts | None:
        """How the family names and stores its experts, or None for a dense model."""
        return FAMILIES[self.family].experts if self.experts else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` is sparse; a multi-token-prediction layer (index >= ``layers``) always is."""
        return bool(self.experts) and (layer >= self.layers or layer in self.moe_layers)


def _family_name(model_type: str | None, where: str) -> str:
    known = known_model_types()
    if model_type is None:
        raise UsageError("no model_type", where=where, fix=f"known: {', '.join(known)}")
    name = ALIASES.get(model_type, model_type)
    if name not in FAMILIES:
        near = suggest(model_type, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise UsageError(f"unknown model_type {model_type!r:.80}", where=where, fix=f"{hint}known: {', '.join(known)}")
    return name


def _read(outer: ConfigReader, model_type: str, family_name: str, family: Family) -> ModelSpec:
    # Vision-language models keep the language model's values in a section of their own, older ones at the top.
    reader = (outer.section("text_config") if family.vision else None) or outer
    hidden = reader.integer("hidden_size")
    layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = reader.integer("num_attention_heads", high=1 << 20)
    kv_heads = reader.integer("num_key_value_heads", default=heads, high=1 << 20)
    if heads % kv_heads:
        reader.fault(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    mla = _latent_attention(reader) if family.latent_attention else None
    experts = _experts(reader, family, layers)
    return ModelSpec(
        model_type=model_type,
        family=family_name,
        architecture=_architecture(outer, family),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=mla.nope_dim + mla.rope_dim if mla else _head_dim(reader, family, hidden, heads),
        ffn=reader.integer("intermediate_size"),
        vocab=reader.integer("vocab_size"),
        tied=outer.boolean("tie_word_embeddings", default=False),
        qkv_bias=_bias(reader, family.qkv_bias),
        o_bias=_bias(reader, family.o_bias),
        mlp_bias=_bias(reader, family.mlp_bias),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        mla=mla,
        mtp_layers=_mtp_layers(reader) if mla else 0,
        vision=read_vision(outer, family.vision) if family.vision else None,
        dtype=_dtype(outer) or _dtype(reader),
        **experts,
    )


def _architecture(reader: ConfigReader, family: Family) -> str:
    named = reader.config.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        return named[0]
    return family.architecture


def _head_dim(reader: ConfigReader, family: Family, hidden: int, heads: int) -> int:
    given = reader.config.get("head_dim") is not None
    if not given and family.default_head_dim is None and hidden % heads:
        reader.fault(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    return reader.integer("head_dim", default=family.default_head_dim or max(hidden // heads, 1), high=1 << 20)


def _mtp_layers(reader: ConfigReader) -> int:
    return reader.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, low=0, high=64)


def _bias(reader: ConfigReader, rule: BiasRule) -> bool:
    return rule if isinstance(rule, bool) else reader.boolean(rule[0], default=rule[1])


def _dtype(reader: ConfigReader) -> str | None:
    named = reader.text("dtype", "torch_dtype")
    if named is None or named == "auto":
        return None
    try:
        return parse_dtype(named)
    except UsageError as error:
        reader.fault(error.message, error.fix)
        return None


def _latent_attention(reader: ConfigReader) -> LatentAttention:
    if "q_lora_rank" not in reader.config:
        reader.fault("q_lora_rank is missing", "write null for a model with one full query projection")
    q_rank = reader.integer("q_lora_rank", default=0)
    return LatentAttention(
        q_rank=q_rank or None,
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim", high=1 << 20),
        rope_dim=reader.integer("qk_rope_head_dim", high=1 << 20),
        v_dim=reader.integer("v_head_dim", high=1 << 20),
    )


def _experts(reader: ConfigReader, family: Family, layers: int) -> dict[str, Any]:
    rule = family.experts
    if rule is None:
        return {}
    count = reader.integer(*rule.count, low=0, high=MAX_EXPERTS)
    width = reader.integer(rule.width)
    shared = 0
    if rule.shared == "shared_expert":
        shared = reader.integer("shared_expert_intermediate_size")
    elif rule.shared == "shared_experts":
        shared = reader.integer("n_shared_experts", default=1, high=1024) * width
    if rule.placement == "sparse_step":
        step = reader.integer("decoder_sparse_step", default=1)
        dense = set(reader.integers("mlp_only_layers"))
        sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    elif rule.placement == "first_k_dense":
        if reader.integer("moe_layer_freq", default=1) != 1:
            reader.fault("moe_layer_freq other than 1 is not supported")
        sparse = tuple(range(reader.integer("first_k_dense_replace", low=0), layers))
    else:
        sparse = tuple(range(layers))
    if count * len(sparse) > MAX_EXPERT_TENSORS:
        reader.fault(f"{count} experts in {len(sparse)} layers is beyond any real model")
    return {
        "experts": count,
        "experts_per_token": reader.integer("num_experts_per_tok", default=1, low=0, high=MAX_EXPERTS),
        "moe_ffn": width,
        "shared_ffn": shared,
        "moe_layers": sparse if count else (),
    }
