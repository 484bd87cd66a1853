"""The architecture of the model that a configuration names, without loading it."""

from __future__ import annotations

from rlctl.errors import UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.ops.planned_model import planned_model


def spec_of(path: str) -> ModelSpec:
    """Return the spec of ``model.path``; see ``planned_model`` for what it may be.

    Raises UsageError when the model is not known here, or only the headers of its files are.
    """
    found = planned_model(path, where="model.path")
    if found.spec is None:
        raise UsageError(
            f"{found.source} says the weights of {path}, not its heads",
            where="model.path",
            fix="give the folder of its config.json, or that file",
        )
    return found.spec
