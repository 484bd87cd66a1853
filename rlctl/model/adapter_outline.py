"""Whether an adapter can belong to a model, by the headers of both: no weight is read, no torch imported."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import Finding, FindingsError, RlctlError
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.contents import LoraModule
from rlctl.schema.work import LoraConfig

WHERE = "model.lora.adapter"


def check_outline(adapter: str, model: str, settings: LoraConfig) -> None:
    """Raise FindingsError when the adapter's rank or scaling is not that of ``settings``, or it has layers that the
    model in folder ``model`` has not, or not of that size. Whether it was trained on these weights is not seen here."""
    try:
        with Adapter.open(adapter) as given:
            modules = given.contents.modules
        shapes = _shapes(model)
    except RlctlError as error:
        raise FindingsError("the adapter cannot be gone on from", [Finding(str(error.message), error.where)]) from error
    findings = [*_other_scaling(modules, settings), *(_other_layers(modules, shapes) if shapes else [])]
    if findings:
        raise FindingsError(f"the adapter in {adapter} cannot be gone on from", findings)


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    if not Path(model).is_dir():
        return {}
    checkpoint = Checkpoint.open(model)
    try:
        return {name: tuple(entry.shape) for name, entry in checkpoint.entries.items()}
    finally:
        checkpoint.close()


def _other_scaling(modules: tuple[LoraModule, ...], settings: LoraConfig) -> list[Finding]:
    for module in modules:
        rank, alpha = module.scaling.r, module.scaling.value * module.scaling.r
        if (rank, alpha) != (settings.rank, settings.alpha):
            message = f"it has rank {rank} and alpha {alpha:g}, not {settings.rank} and {settings.alpha:g}"
            return [Finding(message, "model.lora.rank", f"set model.lora.rank={rank} model.lora.alpha={alpha:g}")]
    return []


def _other_layers(modules: tuple[LoraModule, ...], shapes: dict[str, tuple[int, ...]]) -> list[Finding]:
    fix = "give the model that the adapter was trained on, or an adapter for this one"
    for module in modules:
        shape = shapes.get(f"{module.path}.{module.parameter or 'weight'}")
        if module.experts > 1:
            continue
        if shape is None:
            return [Finding(f"it is for another model: this one has no {module.path}", WHERE, fix)]
        if sorted(shape) != sorted((module.outputs, module.inputs)):
            here = " x ".join(map(str, shape))
            message = f"it is for another model: {module.path} is {module.outputs} x {module.inputs} in it, {here} here"
            return [Finding(message, WHERE, fix)]
    return []
