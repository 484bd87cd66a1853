"""Putting a LoRA adapter on a model, by PEFT, once it is known that it can be trained and folded in again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.patterns import is_target, unmatched_targets
from rlctl.model.adapter_faults import ALL_LINEAR, TARGETS, target_fault
from rlctl.model_making import ONE_AT_A_TIME
from rlctl.schema.work import LoraConfig


def base_name(source: str) -> str:
    """Return how whoever loads an adapter finds its model: the whole path of a folder, or a hub name."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def add_adapter(model: Any, settings: LoraConfig, *, seed: int, base: str) -> AdapterConfig:
    """Put an adapter on ``model``, in place, freeze everything else, and return the adapter's configuration.

    A is drawn from ``seed`` alone, B is zero: the model computes what it did before.

    Args:
        model: a transformers causal LM.
        settings: rank above 0, alpha, target modules.
        seed: of A.
        base: where whoever loads the adapter finds the model.

    Raises:
        UsageError: target modules that the model does not have, or that PEFT does not take.
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
    layers, stacked = _layers(model), stacked_parameters(model)
    fault = target_fault(layers, stacked, settings.target_modules)
    if fault is not None:
        raise UsageError(fault.message, where=fault.where, fix=fault.fix)
    everything = settings.target_modules == [ALL_LINEAR]
    names = [] if everything else settings.target_modules
    chosen = [name for name in names if not unmatched_targets([name], layers)]
    experts = [name for name in names if not unmatched_targets([name], stacked)]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=ALL_LINEAR if everything else chosen,
        target_parameters=experts or None,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(_is_transposed(module) for module in model.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UsageError(f"PEFT does not take these modules: {error}", where=TARGETS) from error
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if not everything:
        _require_all(adapted, [path for path in layers if is_target(path, chosen)])
    return AdapterConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        fan_in_fan_out=config.fan_in_fan_out,
        target_modules=_names(layers, adapted.intersection(layers)),
        target_parameters=tuple(sorted(config.target_parameters or ())),
        rank_pattern=dict(config.rank_pattern or {}),
        alpha_pattern=dict(config.alpha_pattern or {}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def adapter_config(model: Any, settings: LoraConfig, *, base: str) -> AdapterConfig:
    """Return the configuration of the adapter that ``add_adapter`` would put on a model, which stays as it is.
    ``base``: folder or hub name of the model."""
    with ONE_AT_A_TIME, torch.device("meta"):
        twin = type(model)(model.config)
    return add_adapter(twin, settings, seed=0, base=base_name(base))


def _require_all(adapted: Collection[str], wanted: Sequence[str]) -> None:
    """Raise UsageError when PEFT left out a module that was asked for."""
    left = [path for path in wanted if path not in adapted]
    if left:
        raise UsageError(
            f"PEFT puts no adapter on {left[0]}: in a model with experts it takes this name for theirs",
            where=TARGETS,
            fix=f"leave it out, or set it to [{ALL_LINEAR}]",
        )


def stacked_parameters(model: Any) -> list[str]:
    """Return the names of parameters that hold the weights of many experts in one tensor (E, ..., ...)."""
    convolutions = (torch.nn.Conv1d, torch.nn.ConvTranspose1d)
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and not isinstance(module, convolutions)
    ]


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
