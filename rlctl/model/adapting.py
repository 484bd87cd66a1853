"""Putting a LoRA adapter on a model, by PEFT, once it is known that it can be trained and folded in again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.patterns import is_target, unmatched_targets
from rlctl.registry import suggest
from rlctl.schema.work import LoraConfig

ALL_LINEAR = "all-linear"


def add_adapter(model: Any, settings: LoraConfig, *, seed: int, base: str) -> AdapterConfig:
    """Put an adapter on ``model``, in place, freeze everything else, and return the adapter's configuration.

    A is drawn from ``seed`` alone, B is zero: the model computes what it did before.

    Args:
        model: a transformers causal LM.
        settings: rank above 0, alpha, target modules.
        seed: of A.
        base: where whoever loads the adapter finds the model.

    Raises:
        UsageError: target modules that the model does not have.
        UnavailableError: peft is not installed.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise UnavailableError(
            "LoRA needs the package peft, which is not installed",
            where="model.lora.rank",
            fix="pip install peft, or pip install 'rlctl[lora]'; model.lora.rank=0 trains all weights without it",
        ) from error
    alpha = settings.alpha
    layers = _layers(model)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=_targets(layers, settings.target_modules),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(_is_transposed(module) for module in model.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return AdapterConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        fan_in_fan_out=config.fan_in_fan_out,
        target_modules=_names(layers, adapted),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def _layers(model: Any) -> list[str]:
    """Return the paths of the modules that can take an adapter."""
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) or _is_transposed(module)]


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the module's weight is stored (in, out), as GPT-2's are."""
    return type(module).__name__ == "Conv1D"


def _names(layers: Sequence[str], adapted: Collection[str]) -> tuple[str, ...]:
    """Return the shortest ``target_modules`` that name the ``adapted`` layers and no other."""
    short = tuple(sorted({path.rpartition(".")[2] for path in adapted}))
    return short if {path for path in layers if is_target(path, short)} == set(adapted) else tuple(sorted(adapted))


def _targets(layers: Sequence[str], wanted: Sequence[str]) -> list[str] | str:
    """Return ``target_modules`` as PEFT takes it. Raises UsageError for entries that name no module."""
    if list(wanted) == [ALL_LINEAR]:
        return ALL_LINEAR
    missing = unmatched_targets(wanted, layers)
    if missing:
        names = sorted({path.rpartition(".")[2] for path in layers})
        near = suggest(missing[0], names)
        guess = f"is it {near!r}? " if near else ""
        raise UsageError(
            f"no module of the model is named {', '.join(missing)}",
            where="model.lora.target_modules",
            fix=f"{guess}linear and embedding modules here: {', '.join(names)}; or [{ALL_LINEAR}]",
        )
    return list(wanted)
