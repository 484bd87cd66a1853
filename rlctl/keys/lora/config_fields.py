"""The fields of ``adapter_config.json``: their types, and reading them without trusting the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlctl.errors import Finding, FindingsError, UsageError

_MAX_RANK = 1 << 20
_MAX_NUMBER = 1e30


class _WrongTypeError(Exception):
    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongTypeError("true or false")
    return value


def _rank(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise _WrongTypeError(f"a whole number from 1 to {_MAX_RANK}")
    return value


def _number(value: Any) -> float:
    # A JSON integer may be too large for a float; NaN and infinity are no scale.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise _WrongTypeError("a finite number")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongTypeError("a string")
    return value


def _anything(value: Any) -> Any:
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple | set) or not all(isinstance(v, str) for v in value):
        raise _WrongTypeError("a list of strings")
    return tuple(sorted(value) if isinstance(value, set) else value)


def _targets(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else _strings(value)


def _integers(value: Any) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise _WrongTypeError("a list of whole numbers")
    return tuple(values)


def _list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _WrongTypeError("a list")
    return tuple(value)


def _bias(value: Any) -> str:
    if value not in ("none", "all", "lora_only"):
        raise _WrongTypeError("'none', 'all' or 'lora_only'")
    return str(value)


def _init(value: Any) -> bool | str:
    if not isinstance(value, bool | str):
        raise _WrongTypeError("true, false or the name of an initialisation")
    return value


def _pattern_of(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def read_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _WrongTypeError("a mapping of patterns")
        out = {}
        for key, entry in value.items():
            try:
                out[key] = read(entry)
            except _WrongTypeError as error:
                found = _type_of(entry)
                raise _WrongTypeError(f"{error.expected} for the pattern {key!r} (which holds {found})") from error
        return out

    return read_mapping


FIELDS: dict[str, Callable[[Any], Any]] = {
    "r": _rank,
    "lora_alpha": _number,
    "use_rslora": _boolean,
    "use_dora": _boolean,
    "rank_pattern": _pattern_of(_rank),
    "alpha_pattern": _pattern_of(_number),
    "fan_in_fan_out": _boolean,
    "target_modules": _targets,
    "exclude_modules": _targets,
    "modules_to_save": _strings,
    "target_parameters": _strings,
    "bias": _bias,
    "lora_bias": _boolean,
    "init_lora_weights": _init,
    "layers_to_transform": _integers,
    "layers_pattern": _strings,
    "layer_replication": _list,
    "trainable_token_indices": _anything,
    "alora_invocation_tokens": _integers,
    "use_qalora": _boolean,
    "use_bdlora": _anything,
    "kasa_config": _anything,
    "arrow_config": _anything,
    "monteclora_config": _anything,
    "base_model_name_or_path": _string,
    "task_type": _string,
}
"""Field -> reader; a null takes the default, but for the rank and alpha."""

CARRIED = (
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "lora_dropout", "lora_ga_config",
    "loftq_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "velora_config",
)  # fmt: skip
"""PEFT's fields that say nothing about names or weights."""

_TYPE_NAMES = {
    bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object",
}  # fmt: skip

_SILENT = ("peft_type", "inference_mode", "runtime_config")


def take(source: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the known fields of ``source`` and notes on missing or ignored keys.

    Raises FindingsError with one finding for every field of a wrong type, UsageError for an adapter that is not LoRA.
    """
    peft_type = source.get("peft_type", "LORA")
    if not isinstance(peft_type, str) or peft_type.upper() != "LORA":
        raise UsageError(f"peft_type is {peft_type!r}; only LORA adapters are read", where=where)
    values: dict[str, Any] = {}
    findings = []
    for name, read in FIELDS.items():
        value = source.get(name)
        if name not in source or (value is None and name not in ("r", "lora_alpha")):
            continue
        try:
            values[name] = read(value)
        except _WrongTypeError as error:
            findings.append(Finding(f"{name}: expected {error.expected}, found {_type_of(value)}", where))
    if findings:
        raise FindingsError("adapter configuration", findings)
    notes = [f"{name} is missing: PEFT's default 8 is used" for name in ("r", "lora_alpha") if name not in source]
    old = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if name not in source]
    if old:
        notes.append(f"written by an old PEFT: {', '.join(old)} missing, taken as unset")
    extra = sorted(str(k) for k in source if k not in FIELDS and k not in CARRIED and k not in _SILENT)
    if extra:
        notes.append(f"ignored: {', '.join(extra)}")
    return values, notes


def _type_of(value: Any) -> str:
    """Return the JSON type of ``value`` and, when it is short, the value."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    name = names.get(type(value), type(value).__name__)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    if isinstance(value, bool | str) and len(str(value)) <= 40:
        return f"{name} ({value!r})"
    if isinstance(value, int) and abs(value) < 1 << 63:
        return f"{name} ({value})"
    return name
