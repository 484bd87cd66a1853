"""Whether a checkpoint's adapter is one that a run can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.errors import RlctlError


def require_same_base(state: Mapping[str, Any], digest: str, base: str) -> None:
    """Raise RlctlError when a state holds no adapter, or one that was trained on another model.

    Args:
        state: of an engine.
        digest: of the model here, without an adapter.
        base: its folder or hub name.
    """
    if "base_digest" not in state:
        raise RlctlError(
            "the checkpoint holds a whole model, not an adapter",
            where="model.lora.rank",
            fix="set model.lora.rank=0, or start another run with --model FINAL of that one",
        )
    if state["base_digest"] != digest:
        raise RlctlError(
            "the checkpoint's adapter was trained on other weights than those of the model",
            where="model.path",
            fix=f"give the model that the run began with; {base} holds another now",
        )


def require_same_shapes(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RlctlError unless a state's parameters (name -> tensor) are those of the adapter here (name -> shape)."""
    if params.keys() != shapes.keys():
        odd = sorted(params.keys() ^ shapes.keys())
        raise other_adapter(f"checkpoint and model differ in {len(odd)} parameters, {odd[0]} first")
    for name, shape in shapes.items():
        if tuple(params[name].shape) != shape:
            found = list(params[name].shape)
            raise other_adapter(f"checkpoint and model differ: {name} is {found}, the model's is {list(shape)}")


def other_adapter(how: str) -> RlctlError:
    """Return the error of a state whose adapter is another than the run's."""
    return RlctlError(how, where="model.lora", fix="set model.lora to what the checkpoint was saved under")
