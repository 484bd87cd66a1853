"""What an adapter folder holds and whether it would act when it is loaded, as plain data for a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.errors import CheckError, Finding, RlctlError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.contents import LoraModule, check_file_names
from rlctl.keys.lora.export import refusals
from rlctl.keys.lora.patterns import unmatched_targets


@dataclass
class AdapterReport:
    """The findings of one inspection.

    Args:
        facts: rank, alpha, flags, and one row for each adapted layer with its effective scaling.
        faults: why it cannot be used as it is.
        warnings: what is likely not meant: layers that do nothing, patterns and targets without effect.
        notes: what was assumed or ignored while reading.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect_adapter(folder: Path | str) -> AdapterReport:
    """Read an adapter folder and judge it; every fault is in the report, none is raised."""
    report = AdapterReport()
    try:
        adapter = Adapter.open(folder)
    except RlctlError as error:
        found = getattr(error, "findings", None)
        report.faults = list(found) if found else [Finding(error.message, error.where, error.fix)]
        return report
    with adapter:
        config, contents = adapter.config, adapter.contents
        report.facts = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "use_rslora": config.use_rslora,
            "use_dora": config.use_dora,
            "init_lora_weights": config.init_lora_weights,
            "base_model": config.base_model_name_or_path,
            "layers": [_layer(module) for module in contents.modules],
            "whole_tensors": sorted(contents.saved),
            "dropped": [{"name": name, "reason": reason} for name, reason in contents.dropped],
        }
        report.notes = list(config.notes)
        _judge_names(adapter, report)
        idle = adapter.idle_modules()
        if idle:
            whose = "every layer" if len(idle) == len(contents.modules) else f"{len(idle)} layers, {idle[0]} first"
            fix = "was it saved before training, or not gathered?"
            report.warnings.append(Finding(f"would load as a no-op: A or B of {whose} is all zero", fix=fix))
        report.warnings += config.zero_hit_patterns(m.site for m in contents.modules)
        paths = [*(m.path for m in contents.modules), *(name.rpartition(".")[0] for name in contents.saved)]
        report.warnings += [
            Finding(f"target_modules entry {target!r} names no layer of the adapter")
            for target in unmatched_targets(config.target_modules, paths)
        ]
        report.warnings += refusals(adapter, "peft-file")
        report.notes += [f"vLLM: {finding}" for finding in refusals(adapter, "vllm-lora")]
    return report


def _layer(module: LoraModule) -> Mapping[str, Any]:
    return {
        "layer": module.site,
        "kind": module.kind,
        "r": module.scaling.r,
        "alpha": module.scaling.alpha,
        "scaling": module.scaling.value,
        "inputs": module.inputs,
        "outputs": module.outputs,
        "experts": module.experts,
    }


def _judge_names(adapter: Adapter, report: AdapterReport) -> None:
    raw = [name for m in adapter.contents.modules for name in (m.a, m.b, m.magnitude) if name is not None]
    try:
        check_file_names(raw)
    except CheckError as error:
        report.faults.append(Finding(f"would load as a no-op: {error.message}", fix=error.fix))
