"""``adapter_config.json`` as PEFT writes it, old files included, and what it means for one module.

Rank, alpha and scaling of a module follow PEFT: the keys of ``rank_pattern`` and ``alpha_pattern`` are regular
expressions that must match from the start of the module path (``(.*\\.)?(KEY)$``), the first match wins, and the
scaling is ``alpha / r``, or ``alpha / sqrt(r)`` with rank-stabilised LoRA (arXiv:2312.03732).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, FindingsError
from rlctl.keys.json_file import read_object
from rlctl.keys.lora import config_fields
from rlctl.keys.lora.patterns import check_pattern, first_match, is_target, key_matches, layer_index

_CONFIG_BYTES = 4 << 20

# Initialisations that set only the adapter's own weights. PiSSA, OLoRA, CorDA and LoRA-GA also take the starting B@A
# out of the base weight and LoftQ replaces it, so that the adapter alone means something else on the original base.
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class Scaling:
    """Effective rank, alpha and scaling of one module."""

    r: int
    alpha: float
    value: float


@dataclass(frozen=True)
class AdapterConfig:
    """One LoRA configuration. The fields are PEFT's, with its defaults; lists are tuples.

    ``notes`` says what was missing or ignored while reading. ``carried`` holds PEFT's fields that mean nothing for
    names or weights (dropout, revision, ...), so that writing the configuration again keeps them.
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    fan_in_fan_out: bool = False
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    bias: str = "none"
    lora_bias: bool = False
    init_lora_weights: bool | str = True
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    layer_replication: tuple[Any, ...] = ()
    trainable_token_indices: Any = None
    alora_invocation_tokens: tuple[int, ...] = ()
    use_qalora: bool = False
    use_bdlora: Any = None
    kasa_config: Any = None
    arrow_config: Any = None
    monteclora_config: Any = None
    base_model_name_or_path: str | None = None
    task_type: str | None = None
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, source: Mapping[str, Any] | str | Path, *, where: str | None = None) -> AdapterConfig:
        """Read a configuration from a mapping, a file, or a folder that holds ``adapter_config.json``.

        Missing fields take PEFT's defaults; keys that PEFT does not know (``enable_lora``, ``merge_weights``) are
        ignored and listed in ``notes``. Raises UsageError for an unreadable file or an adapter that is not LoRA,
        FindingsError that names every wrong key with the type that was expected and the type found.
        """
        if isinstance(source, str | Path):
            path = Path(source)
            path = path / "adapter_config.json" if path.is_dir() else path
            where = where or str(path)
            source = read_object(path, limit=_CONFIG_BYTES)
        where = where or "adapter_config.json"
        values, notes = config_fields.take(source, where)
        config = cls(**values, carried={k: source[k] for k in config_fields.CARRIED if k in source}, notes=tuple(notes))
        config._check(where)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as PEFT reads it (JSON types only)."""
        out: dict[str, Any] = {"peft_type": "LORA", "inference_mode": True, **self.carried}
        for name in config_fields.FIELDS:
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value) or ([] if name == "target_modules" else None)
            out[name] = dict(value) if isinstance(value, Mapping) else value
        return out

    def scaling(self, path: str) -> Scaling:
        """Return rank, alpha and scaling at ``path``: a module without ``base_model.model.``, or for an expert tensor
        the parameter (``...experts.gate_up_proj``)."""
        rank, alpha = first_match(self.rank_pattern, path), first_match(self.alpha_pattern, path)
        r = rank[1] if rank else self.r
        value = float(alpha[1] if alpha else self.lora_alpha)
        return Scaling(r, value, value / (math.sqrt(r) if self.use_rslora else r))

    def pattern_hits(self, paths: Iterable[str]) -> dict[tuple[str, str], list[str]]:
        """Return ``(field, key) -> paths it decides`` for every pattern key; an empty list is a key without effect.

        A key behind another that matches the same paths decides nothing, as the first match wins.
        """
        known = list(paths)
        hits: dict[tuple[str, str], list[str]] = {}
        for name, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            hits.update({(name, key): [] for key in patterns})
            for path in known:
                found = first_match(patterns, path)
                if found:
                    hits[name, found[0]].append(path)
        return hits

    def zero_hit_patterns(self, paths: Iterable[str]) -> list[Finding]:
        """Return one finding for every pattern key that decides none of ``paths``."""
        known = list(paths)
        findings = []
        for (name, key), hits in self.pattern_hits(known).items():
            if hits:
                continue
            shadowed = any(key_matches(key, path) for path in known)
            why = "is shadowed by an earlier key" if shadowed else "matches no module of the adapter"
            fix = f"module paths look like {known[0]!r}" if known else None
            findings.append(Finding(f"{name} key {key!r} {why}", fix=fix))
        return findings

    def targets(self, path: str) -> bool:
        """Whether PEFT would put a LoRA layer on the module at ``path`` (linear or embedding)."""
        if self.exclude_modules and is_target(path, self.exclude_modules):
            return False
        if any(f".{name}." in f".{path}." for name in self.modules_to_save):
            return False
        if not self.target_modules or not is_target(path, self.target_modules):
            return False
        if self.layers_to_transform and not isinstance(self.target_modules, str):
            return layer_index(path, self.layers_pattern) in self.layers_to_transform
        return True

    def changes(self, name: str) -> bool:
        """Whether an adapter of this kind adds to the base tensor of this Hugging Face name."""
        path, _, leaf = name.rpartition(".")
        if bool(self.target_parameters) and is_target(name, self.target_parameters):
            return True
        return leaf == "weight" and self.targets(path)

    def base_moved_by(self) -> str | None:
        """Return what changed the base weights when training began, or None.

        Such an adapter fits only the changed base that was trained, unless it was converted when it was saved (PEFT
        then writes ``init_lora_weights: true``). An initialisation of unknown name counts as one that may have.
        """
        if self.kasa_config:
            return "kasa_config"
        init = self.init_lora_weights
        if not isinstance(init, str) or init.lower() in _KEEPS_BASE:
            return None
        return f"init_lora_weights={init!r}"

    def not_plain(self) -> list[str]:
        """Return the fields that make the adapter something other than ``W + s*B@A`` (or DoRA) on the same model."""
        named = {
            "layer_replication": self.layer_replication,
            "trainable_token_indices": self.trainable_token_indices,
            "alora_invocation_tokens": self.alora_invocation_tokens,
            "use_qalora": self.use_qalora,
            "use_bdlora": self.use_bdlora,
            "kasa_config": self.kasa_config,
            "arrow_config": self.arrow_config,
            "monteclora_config": self.monteclora_config,
        }
        return [f"{name}={value!r}" for name, value in named.items() if value]

    def _check(self, where: str) -> None:
        findings = []
        for name, value in (("lora_alpha", self.lora_alpha), *self.alpha_pattern.items()):
            if value == 0:
                label = name if name == "lora_alpha" else f"alpha_pattern[{name!r}]"
                findings.append(
                    Finding(f"{label} is 0: every delta would be zero", where, "write the alpha of training")
                )
        if findings:
            raise FindingsError("adapter configuration", findings)
        for pattern in (*self.rank_pattern, *self.alpha_pattern, *self.layers_pattern):
            check_pattern(pattern, where)
        for targets in (self.target_modules, self.exclude_modules):
            if isinstance(targets, str):
                check_pattern(targets, where, whole=True)
