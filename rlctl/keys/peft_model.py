"""A checkpoint of a model inside PEFT: its base weights under their own names, and the tensors of its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlctl.errors import Finding
from rlctl.keys.layout import Ref
from rlctl.keys.lora.names import PEFT_PREFIX, Part, parse_key

T = TypeVar("T")
_MARKS = (".lora_", ".base_layer.", ".modules_to_save.")


@dataclass(frozen=True)
class Parted(Generic[T]):
    """Base weights by Hugging Face name, adapter tensors by the name they had, and what does not come apart."""

    base: dict[Ref, T]
    adapter: dict[Ref, T]
    origin: dict[Ref, str]
    findings: list[Finding]


def has_adapters(names: Mapping[Ref, object]) -> bool:
    """Tell whether the names are those of a model inside PEFT."""
    return any(ref.name.startswith(PEFT_PREFIX) or any(mark in f".{ref.name}" for mark in _MARKS) for ref in names)


def part(tensors: Mapping[Ref, T]) -> Parted[T]:
    """Part the tensors of a model inside PEFT.

    The frozen original of a module in ``modules_to_save`` is a base weight; the trained copy is the adapter's.
    """
    base: dict[Ref, T] = {}
    adapter: dict[Ref, T] = {}
    origin: dict[Ref, str] = {}
    findings = []
    for ref, tensor in tensors.items():
        key = parse_key(ref.name)
        if key.part not in (Part.BASE, Part.ORIGINAL):
            adapter[ref] = tensor
            continue
        clean = Ref(key.parameter, ref.shard)
        if clean in base:
            findings.append(Finding(f"becomes {clean}, as {origin[clean]} does", str(ref)))
        base[clean] = tensor
        origin[clean] = ref.name
    return Parted(base, adapter, origin, findings)
