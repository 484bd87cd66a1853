"""What devices that train an adapter are made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlctl.errors import UsageError
from rlctl.hybrid.lora.checkpoint_engine import AdapterReshardEngine
from rlctl.hybrid.lora.parts import adapter_modules, adapter_weights
from rlctl.hybrid.lora.switching import AdapterResharder
from rlctl.hybrid.padded import make_resharder
from rlctl.hybrid.reshard.resharder import Resharder
from rlctl.hybrid.zeros import is_padded
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import LoraModule
from rlctl.model.fsdp2.engine import Fsdp2Engine
from rlctl.model.fsdp2.lora import Fsdp2LoraEngine
from rlctl.rollout.on_ranks import TrainedAdapter
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.plan import Plan


def adapter_engine(adapter: TrainedAdapter, *, parked: bool) -> Callable[[Member, EngineOptions], AdapterReshardEngine]:
    """Return what makes a device's checkpoint engine, given layouts of the model's own weights.

    Args:
        adapter: that the devices train.
        parked: training shards leave the device while it generates.

    Raises:
        UsageError: an adapter that cannot be folded in there.
    """
    modules = adapter_modules(AdapterConfig.parse(adapter.config), adapter.shapes)

    def make(member: Member, options: EngineOptions) -> AdapterReshardEngine:
        assert options.layouts is not None
        weights = options.layouts.weights
        layouts = replace(options.layouts, weights=(*weights, *adapter_weights(modules, weights)))
        told = replace(options, layouts=layouts)
        return AdapterReshardEngine(member, told, modules=modules, keeps=adapter.alone, parked=parked)

    return make


def training_engine(
    model: Any, optimizer: OptimizerConfig, *, lora: LoraConfig | None, seed: int, tp: int, **more: Any
) -> Fsdp2Engine:
    """Return one rank of a model that is trained whole, or whose adapter is.

    Args:
        model, optimizer, tp, more: see ``Fsdp2Engine``.
        lora: the adapter; None, or of rank 0, trains all weights.
        seed: of the adapter's first values.

    Raises:
        UsageError: an adapter that devices cannot train or generate with.
    """
    if lora is None or not lora.rank:
        return Fsdp2Engine(model, optimizer, tp=tp, **more)
    if tp > 1:
        raise UsageError(
            "LoRA trains on ranks that each hold whole layers' shards, and dp+fsdp+tp cuts within layers",
            fix='training_parallel="dp+fsdp"',
        )
    base = str(getattr(model.config, "_name_or_path", ""))
    return Fsdp2LoraEngine(model, optimizer, lora=lora, seed=seed, base=base, **more)


def modules_of(training: Fsdp2Engine) -> tuple[LoraModule, ...]:
    """Return the layers whose adapter is trained; none where all weights are. Raises as ``adapter_modules``."""
    if not isinstance(training, Fsdp2LoraEngine):
        return ()
    return adapter_modules(training.adapter_config, training.trained_shapes())


def held_by(training: Fsdp2Engine) -> dict[str, torch.Tensor]:
    """Return this rank's training shards, by the names of the plan."""
    return dict(training.base_and_adapter() if isinstance(training, Fsdp2LoraEngine) else training.local_masters())


def resharder(
    plan: Plan,
    modules: Sequence[LoraModule],
    *,
    deadline: float,
    delta: bool,
    keeps: bool,
    parked: bool,
) -> Resharder | AdapterResharder:
    """Return what switches; see ``Resharder``, and where there are ``modules``, ``AdapterResharder``.

    Raises:
        UsageError: changes are to be sent of adapters, or they are to be added to padded parts.
    """
    if not modules:
        return make_resharder(plan, None, deadline=deadline, delta=delta)
    if delta:
        raise UsageError(
            "a switch of a model with an adapter moves the adapter alone, and an update changes all of that",
            fix="leave delta out",
        )
    if is_padded(plan):
        raise UsageError("an adapter is not added to weights that are padded", fix="leave pad out")
    return AdapterResharder(plan, modules, None, deadline=deadline, keeps=keeps, parked=parked)
