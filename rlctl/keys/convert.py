"""Converting what is on disk from one naming scheme to another: a model, or an adapter on its own."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.keys.conversion import ADAPTER_TARGETS, MODEL_TARGETS, Conversion, Prepared
from rlctl.keys.convert_adapter import prepare_adapter
from rlctl.keys.convert_by_name import is_merge_by_name, prepare_merge
from rlctl.keys.convert_model import prepare_model

__all__ = ["ADAPTER_TARGETS", "MODEL_TARGETS", "Conversion", "Prepared", "prepare"]


def prepare(conversion: Conversion) -> Prepared:
    """Open the source, recognise it and plan the conversion; nothing is written. ``write`` of the result does it.

    Raises UsageError for what cannot be planned at all, PlanError for an adapter that cannot be what is asked for;
    everything else is in the ``findings`` of the result.
    """
    if is_merge_by_name(conversion):
        return prepare_merge(conversion)
    if conversion.to in MODEL_TARGETS:
        return prepare_model(conversion)
    if conversion.to in ADAPTER_TARGETS:
        return prepare_adapter(conversion)
    known = ", ".join((*MODEL_TARGETS, *ADAPTER_TARGETS))
    raise UsageError(f"unknown target {conversion.to!r}", where="--to", fix=f"known: {known}")
