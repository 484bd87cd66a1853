"""Checks of a LoRA run against the files that it names, without torch: a dry run makes them, too.

They need the model's folder and an architecture that rlctl knows. What they leave open is checked when the model is
loaded, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.errors import Finding, FindingsError, RlctlError, UsageError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import Contents, read_contents
from rlctl.keys.lora.patterns import is_target
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.shapes import fused_tensor_shapes
from rlctl.model.adapter_faults import (
    ADAPTER,
    ALL_LINEAR,
    TARGETS,
    base_name_fault,
    begin_faults,
    target_fault,
)
from rlctl.model.base_reference import read_base
from rlctl.model.locate import find_adapter
from rlctl.ops.resolve import Resolution
from rlctl.schema import Config
from rlctl.schema.work import LoraConfig
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.trainers.contracts import CheckResult

_TARGETS_RULE, _ADAPTER_RULE = "targets_are_in_the_model", "adapter_fits_the_model"


def with_adapter_checks(resolution: Resolution) -> Resolution:
    """Return ``resolution`` with the outcome of these checks among its own; the same without an adapter."""
    return replace(resolution, checks=(*resolution.checks, *_checks(resolution.config)))


@dataclass(frozen=True)
class _Layers:
    """What of a model can take an adapter: path -> (outputs, inputs); names of stacked experts."""

    linear: dict[str, tuple[int, ...]]
    embeddings: dict[str, tuple[int, ...]]
    stacked: tuple[str, ...]
    tied: bool


def _checks(config: Config) -> Iterator[CheckResult]:
    lora = config.model.lora
    if not lora.rank or not lora.target_modules:
        return
    layers = _layers_of(config.model.path)
    if layers is not None:
        yield _targets_check(lora, layers)
    if lora.adapter is not None:
        faults = _adapter_faults(config, layers)
        yield from (CheckResult(_ADAPTER_RULE, "violated", f.message, f.where, f.fix) for f in faults)
        if not faults:
            yield CheckResult(_ADAPTER_RULE, "ok", "the adapter to begin with has the run's modules, shapes and rank")


def _targets_check(lora: LoraConfig, layers: _Layers) -> CheckResult:
    fault = target_fault([*layers.linear, *layers.embeddings], layers.stacked, lora.target_modules)
    fault = fault or _tied_fault(lora, layers) or _dora_fault(lora, layers)
    if fault is not None:
        return CheckResult(_TARGETS_RULE, "violated", fault.message, fault.where, fault.fix)
    return CheckResult(_TARGETS_RULE, "ok", "the model has every module that is to get an adapter")


def _tied_fault(lora: LoraConfig, layers: _Layers) -> Finding | None:
    ends = [name for name in ("lm_head", "embed_tokens") if _names_end(lora, layers, name)]
    if not layers.tied or not ends:
        return None
    message = f"the model ties the head to the embedding, and an adapter on {ends[0]} would tell them apart"
    return Finding(message, TARGETS, f"leave {ends[0]} out")


def _dora_fault(lora: LoraConfig, layers: _Layers) -> Finding | None:
    named = lora.target_modules != [ALL_LINEAR] and any(is_target(n, lora.target_modules) for n in layers.stacked)
    if not lora.use_dora or not named:
        return None
    fix = f"leave the experts out of {TARGETS}, or set model.lora.use_dora=false"
    return Finding("DoRA cannot be trained on stacked experts", "model.lora.use_dora", fix)


def _names_end(lora: LoraConfig, layers: _Layers, name: str) -> bool:
    paths = [path for path in (*layers.linear, *layers.embeddings) if path.rpartition(".")[2] == name]
    return lora.target_modules != [ALL_LINEAR] and any(is_target(path, lora.target_modules) for path in paths)


def _layers_of(model: str) -> _Layers | None:
    """Return the layers of a model, None where that takes more than a known architecture's config.json."""
    folder = builtin_model_path(model) or Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return None
    try:
        spec = ModelSpec.from_folder(folder)
    except UsageError:  # an architecture of another kind, which transformers may know
        return None
    shapes = fused_tensor_shapes(spec)
    matrices = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if _is_matrix(name, shape)}
    if spec.tied:
        matrices["lm_head"] = (spec.vocab, spec.hidden)
    embeddings = {path: shape for path, shape in matrices.items() if path.endswith("embed_tokens")}
    linear = {path: shape for path, shape in matrices.items() if path not in embeddings}
    stacked = tuple(name for name, shape in shapes.items() if len(shape) == 3)
    return _Layers(linear, embeddings, stacked, spec.tied)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _adapter_faults(config: Config, layers: _Layers | None) -> list[Finding]:
    assert config.model.lora.adapter is not None
    try:
        folder = find_adapter(config.model.lora.adapter)
        with Adapter.open(folder) as given:
            # With a digest of its base, that is compared when the model is loaded, whatever the name.
            named = None if read_base(Path(folder)) else base_name_fault(given.config, config.model.path)
            faults = [named] if named else []
            # Which layers of a model with experts get an adapter is for PEFT to say.
            if layers is not None and not layers.stacked:
                own = _own_contents(config.model.lora, layers)
                faults += [] if own is None else begin_faults(given.config, given.contents, own)
            return faults
    except FindingsError as error:
        return [Finding(fault.message, ADAPTER, fault.fix) for fault in error.findings]
    except RlctlError as error:
        return [Finding(error.message, ADAPTER, error.fix)]


def _own_contents(lora: LoraConfig, layers: _Layers) -> Contents | None:
    """Return what the run's own adapter will be; None for one that cannot be."""
    everything = lora.target_modules == [ALL_LINEAR]
    shapes: dict[str, tuple[int, ...]] = {}
    magnitudes: dict[str, tuple[int, ...]] = {}
    for path, (outputs, inputs) in layers.linear.items():
        if path != "lm_head" if everything else is_target(path, lora.target_modules):
            shapes[f"{path}.lora_A.weight"] = (lora.rank, inputs)
            shapes[f"{path}.lora_B.weight"] = (outputs, lora.rank)
            magnitudes[f"{path}.lora_magnitude_vector"] = (outputs,)
    for path, (vocabulary, width) in layers.embeddings.items():
        if not everything and is_target(path, lora.target_modules):
            shapes[f"{path}.lora_embedding_A"] = (lora.rank, vocabulary)
            shapes[f"{path}.lora_embedding_B"] = (width, lora.rank)
            magnitudes[f"{path}.lora_magnitude_vector"] = (width,)
    if not shapes:
        return None
    config = AdapterConfig(r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, use_dora=lora.use_dora)
    return read_contents(shapes | (magnitudes if lora.use_dora else {}), config)
