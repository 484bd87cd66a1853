"""Names of LoRA tensors: read from any form they are found in, written for PEFT in memory, a PEFT file, or vLLM.

In a model, PEFT's names carry the adapter's name behind the LoRA segment (``q_proj.lora_A.default.weight``) and
``base_layer`` in front of what they wrap; in a file both are gone but for stacked expert tensors, whose inner wrapper
is ``experts.base_layer``. ``path`` is the module's name in the Hugging Face model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from rlctl.errors import UsageError
from rlctl.keys import wrappers

Target = Literal["hf", "peft-in-model", "peft-file", "vllm-lora"]

PEFT_PREFIX = "base_model.model."


class Part(Enum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    B_BIAS = "lora_B.bias"
    SAVED = "modules_to_save"
    ORIGINAL = "original_module"
    TOKENS = "token_adapter"
    BASE = "base"
    UNKNOWN = "unknown"


_FACTORS = (Part.A, Part.B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.MAGNITUDE)
_BY_SEGMENT = {part.value: part for part in _FACTORS}


@dataclass(frozen=True)
class AdapterKey:
    """One name, taken apart.

    Args:
        path: the module in the Hugging Face model (``model.layers.0.self_attn.q_proj``), without any ``base_layer``.
        part: what the tensor is to the module.
        adapter: the adapter's name where the raw name had one.
        depth: number of ``base_layer`` segments behind the path: 1 for the inner of two stacked expert wrappers.
        leaf: the parameter within the module (``weight``, ``bias``, ``gate_up_proj``) for whole parameters; empty for
            the LoRA factors.
    """

    path: str
    part: Part
    adapter: str | None = None
    depth: int = 0
    leaf: str = ""

    @property
    def parameter(self) -> str:
        """The Hugging Face name of a whole parameter (parts BASE, SAVED, ORIGINAL)."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


def parse_key(raw: str) -> AdapterKey:
    """Take one name apart, wrappers and ``base_model.model.`` first. Never fails: an adapter segment of unknown kind
    gives part UNKNOWN, anything else without an adapter segment is part BASE."""
    name = wrappers.strip(raw)
    segments = name.removeprefix(PEFT_PREFIX).split(".")
    for at, segment in enumerate(segments):
        rest = segments[at + 1 :]
        found = _factor(segment, rest) if segment in _BY_SEGMENT else _whole(segment, rest)
        if found is not None and not any(before.startswith("lora_") for before in segments[:at]):
            path, depth = _unwrap(segments[:at])
            return replace(found, path=path, depth=depth)
    if any(segment.startswith("lora_") for segment in segments):
        return AdapterKey(".".join(segments), Part.UNKNOWN)
    path, depth = _unwrap(segments[:-1])
    return AdapterKey(path, Part.BASE, depth=depth, leaf=segments[-1])


def format_key(key: AdapterKey, target: Target, *, adapter: str = "default") -> str:
    """Write ``key`` for ``target``; ``adapter`` is the name to give it in a model. Raises UsageError where the target
    has no place for such a tensor."""
    if target == "hf":
        if key.part not in (Part.BASE, Part.SAVED):
            raise UsageError(f"{key.part.value} of {key.path} has no name in a plain Hugging Face model")
        return key.parameter
    if target == "peft-in-model":
        return PEFT_PREFIX + _in_model(key, adapter)
    if key.part in (Part.BASE, Part.ORIGINAL, Part.UNKNOWN, Part.TOKENS):
        raise UsageError(f"{key.part.value} tensor of {key.path} does not belong in an adapter file")
    if target == "vllm-lora" and key.part in (Part.MAGNITUDE, Part.B_BIAS):
        raise UsageError(
            f"vLLM loads no {key.part.value} (of {key.path})", fix="merge the adapter into the base instead"
        )
    return PEFT_PREFIX + _in_file(key)


def _factor(segment: str, rest: list[str]) -> AdapterKey | None:
    """Read what follows a LoRA segment; None when it does not fit, as in an adapter named like the segment."""
    part = _BY_SEGMENT[segment]
    if part in (Part.A, Part.B):
        if len(rest) not in (1, 2) or rest[-1] not in ("weight", "bias"):
            return None
        if rest[-1] == "bias":
            part = Part.B_BIAS if part is Part.B else Part.UNKNOWN
        return AdapterKey("", part, adapter=rest[0] if len(rest) == 2 else None)
    if part is Part.MAGNITUDE and rest and rest[-1] == "weight":
        rest = rest[:-1]
    if len(rest) > 1:
        return None
    return AdapterKey("", part, adapter=rest[0] if rest else None)


def _whole(segment: str, rest: list[str]) -> AdapterKey | None:
    if segment == Part.SAVED.value and len(rest) >= 2:
        return AdapterKey("", Part.SAVED, adapter=rest[0], leaf=".".join(rest[1:]))
    if segment == Part.ORIGINAL.value and rest:
        return AdapterKey("", Part.ORIGINAL, leaf=".".join(rest))
    if segment == Part.TOKENS.value and rest:
        return AdapterKey("", Part.TOKENS, leaf=".".join(rest))
    return None


def _unwrap(segments: list[str]) -> tuple[str, int]:
    kept = [s for s in segments if s != "base_layer"]
    return ".".join(kept), len(segments) - len(kept)


def _in_model(key: AdapterKey, adapter: str) -> str:
    wrapped = key.path + ".base_layer" * key.depth
    match key.part:
        case Part.A | Part.B:
            return f"{wrapped}.{key.part.value}.{adapter}.weight"
        case Part.B_BIAS:
            return f"{wrapped}.lora_B.{adapter}.bias"
        case Part.EMBEDDING_A | Part.EMBEDDING_B:
            return f"{wrapped}.{key.part.value}.{adapter}"
        case Part.MAGNITUDE:
            return f"{wrapped}.lora_magnitude_vector.{adapter}.weight"
        case Part.SAVED:
            return f"{key.path}.modules_to_save.{adapter}.{key.leaf}"
        case Part.ORIGINAL:
            return f"{key.path}.original_module.{key.leaf}"
        case Part.BASE:
            return f"{wrapped}.{key.leaf}" if wrapped else key.leaf
        case _:
            raise UsageError(f"cannot name the {key.part.value} tensor {key.path}")


def _in_file(key: AdapterKey) -> str:
    wrapped = key.path + ".base_layer" * key.depth
    match key.part:
        case Part.A | Part.B:
            return f"{wrapped}.{key.part.value}.weight"
        case Part.B_BIAS:
            return f"{wrapped}.lora_B.bias"
        case Part.SAVED:
            return key.parameter
        case _:
            return f"{wrapped}.{key.part.value}"
