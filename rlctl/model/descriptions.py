"""What a model folder says of itself in its config.json, before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError, UsageError
from rlctl.keys.json_file import read_object

_CLASSIFIER = "ForSequenceClassification"
_CONFIG_BYTES = 16 << 20
_LABELS = 2
"""Outputs of a classifier whose configuration names none (transformers' default)."""


def read_description(source: str, where: str) -> dict[str, Any] | None:
    """Return the config.json of a model folder; None for a hub name. Raises UsageError for a damaged one."""
    folder = Path(source)
    if not folder.is_dir():
        return None
    try:
        return read_object(folder / "config.json", limit=_CONFIG_BYTES)
    except RlctlError as error:
        raise UsageError(f"{error.where}: {error.message}", where=where, fix="give a transformers folder") from error


def require_weights(source: str, where: str) -> None:
    """Raise UsageError when a folder holds no safetensors file."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"folder {source} holds no *.safetensors",
            where=where,
            fix="save the model with save_pretrained; weights in pickled files (.bin) are not read",
        )


def require_language_model(source: str, where: str) -> None:
    """Raise UsageError when the folder holds a classifier."""
    kinds = _kinds(read_description(source, where))
    if kinds and all(kind.endswith("Classification") for kind in kinds):
        raise UsageError(
            f"{source} is a {kinds[0]}: it has no head that predicts tokens",
            where=where,
            fix="give a causal language model (...ForCausalLM); a classifier goes under reward_model.path",
        )


def require_classifier(source: str, output: int | None, where: str = "reward_model.path") -> None:
    """Raise UsageError when the folder holds no sequence classifier, or ``output`` does not say which output to take.

    Classes of the folder's own are taken at their word.
    """
    description = read_description(source, where)
    if description is None:
        return
    kinds, own = _kinds(description), description.get("auto_map")
    mapped = isinstance(own, Mapping) and f"AutoModel{_CLASSIFIER}" in own
    if kinds and not mapped and not any(kind.endswith(_CLASSIFIER) for kind in kinds):
        raise UsageError(
            f"{source} is a {kinds[0]}: it has no trained head that scores, its scores would be random",
            where=where,
            fix=f"give a model that was trained and saved as a sequence classifier (...{_CLASSIFIER})",
        )
    labels = description.get("id2label")
    check_outputs(len(labels) if isinstance(labels, Mapping) else _LABELS, output)


def check_outputs(count: int, output: int | None) -> None:
    """Raise UsageError unless it is plain which of a reward model's ``count`` outputs is the score."""
    if output is None and count > 1:
        raise UsageError(
            f"the reward model has {count} outputs, and none is named as the score",
            where="reward_model.output",
            fix=f"set it to one of 0 .. {count - 1}",
        )
    if output is not None and output >= count:
        raise UsageError(
            f"the reward model has {count} output{'s' if count > 1 else ''}, counted from 0; {output} is none of them",
            where="reward_model.output",
            fix=f"set it to one of 0 .. {count - 1}" if count > 1 else "leave it unset",
        )


def _kinds(description: Mapping[str, Any] | None) -> list[str]:
    kinds = (description or {}).get("architectures")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []
