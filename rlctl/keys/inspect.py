"""What is at a path: scheme, tensors, faults of index and names, an adapter's settings, and what would do nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.errors import Finding, FindingsError, RlctlError
from rlctl.keys.compose import compose
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import check_file_names
from rlctl.keys.merging import adapter_in_model, plan_merge
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.named import Named, open_names
from rlctl.keys.opened import Opened, open_model
from rlctl.keys.plan import PlanError
from rlctl.keys.schemes.hf import hf_layout
from rlctl.keys.stored_tensors import StoredTensors


@dataclass
class Inspection:
    """What was found.

    Args:
        path: what was looked at.
        kind: the container.
        scheme: the scheme of the names, or None when it could not be told.
        why: what kind and scheme were told by.
        tensors, nbytes, files: how many, and how large.
        dtypes: dtype -> how many tensors.
        model_type: of the configuration that belongs to it.
        adapter: configuration, layers with their effective scaling, and whole tensors, of an adapter.
        findings: faults, and what would load and do nothing.
        notes: what a user should know.
    """

    path: Path
    kind: str
    scheme: str | None
    why: list[str]
    tensors: int
    nbytes: int
    files: int
    dtypes: dict[str, int]
    model_type: str | None = None
    adapter: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise PlanError when there are findings."""
        if self.findings:
            raise PlanError(f"{self.path} is not sound", self.findings)

    def document(self) -> dict[str, Any]:
        """Return everything for a report."""
        return {
            "path": str(self.path),
            "container": self.kind,
            "scheme": self.scheme,
            "recognised": self.why,
            "model_type": self.model_type,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "files": self.files,
            "dtypes": self.dtypes,
            "adapter": self.adapter,
            "findings": [{"message": f.message, "where": f.where, "fix": f.fix} for f in self.findings],
            "notes": self.notes,
        }


def inspect(path: Path, *, base: Path | None = None) -> Inspection:
    """Look at a model or an adapter. Only an adapter's tensors are read.

    Args:
        path: a folder or a file.
        base: the base model of an adapter, to see whether it fits; or the folder of a config.json.

    Raises UsageError when nothing known lies there.
    """
    named = open_names(path)
    stored = StoredTensors.of({**named.base, **named.adapter})
    found = Inspection(
        path,
        named.container.kind,
        None,
        [named.container.why],
        len(stored.infos),
        stored.nbytes,
        len(stored.files()),
        dict(Counter(info.dtype for info in stored.infos.values()).most_common()),
        findings=list(named.findings),
        notes=list(named.notes),
    )
    stored.close()
    if named.container.kind == "adapter":
        found.scheme = "peft"
        _look_at_adapter_folder(path, base, found)
        return found
    opened = _model(path, base, found)
    if named.adapter:
        _look_at_adapter_in_model(named, opened, found)
    return found


def _model(path: Path, base: Path | None, found: Inspection) -> Opened | None:
    try:
        opened = open_model(path, base=base)
    except RlctlError as error:
        found.findings.extend(_findings(error))
        return None
    found.scheme, found.why, found.model_type = opened.scheme, opened.why, opened.known.model_type
    plan = compose(opened.layout, hf_layout(opened.known, opened.shapes), opened.tensors.infos)
    found.findings += plan.findings
    found.notes = [*opened.notes, *plan.notes]
    return opened


def _look_at_adapter_folder(folder: Path, base: Path | None, found: Inspection) -> None:
    from rlctl.keys.checkpoint import Checkpoint

    with Checkpoint.open(folder) as checkpoint:
        try:
            check_file_names(checkpoint.entries)
        except RlctlError as error:
            found.findings.extend(_findings(error))
    try:
        with Adapter.open(folder) as adapter:
            _describe(adapter, found)
            if base is not None:
                model = open_model(base)
                found.model_type = model.known.model_type
                plan_merge(adapter, folder, model.tensors, model.known, base_is_moved=False, untie=True)
    except RlctlError as error:
        found.findings.extend(_findings(error))
        found.adapter = found.adapter or {"config": _config(folder)}


def _look_at_adapter_in_model(named: Named, opened: Opened | None, found: Inspection) -> None:
    try:
        with adapter_in_model(named.adapter, named.container, None) as adapter:
            _describe(adapter, found)
            if opened is not None:
                spec: ModelSpec = opened.known
                plan_merge(adapter, named.container.path, opened.tensors, spec, base_is_moved=False, untie=True)
    except RlctlError as error:
        found.findings.extend(_findings(error))


def _describe(adapter: Adapter, found: Inspection) -> None:
    config, contents = adapter.config, adapter.contents
    found.adapter = {
        "config": config.to_dict(),
        "modules": [
            {
                "path": module.site,
                "kind": module.kind,
                "rank": module.scaling.r,
                "alpha": module.scaling.alpha,
                "scaling": module.scaling.value,
                "inputs": module.inputs,
                "outputs": module.outputs,
                "experts": module.experts,
                "dora": module.magnitude is not None,
            }
            for module in contents.modules
        ],
        "saved": sorted(contents.saved),
        "dropped": [{"name": name, "reason": reason} for name, reason in contents.dropped],
    }
    found.notes += list(config.notes)
    sites = [module.site for module in contents.modules]
    found.notes += [f"warning: {finding}" for finding in config.zero_hit_patterns(sites)]
    moved = config.base_moved_by()
    if moved:
        found.notes.append(f"warning: {moved} changed the base weights: the adapter alone does not fit the original")
    idle = adapter.idle_modules()
    found.findings += [Finding("would load and do nothing: A or B is zero throughout", site) for site in idle]


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        return AdapterConfig.parse(folder).to_dict()
    except RlctlError:
        return None  # its faults are findings already


def _findings(error: RlctlError) -> list[Finding]:
    if isinstance(error, FindingsError):
        return error.findings
    return [Finding(error.message, error.where, error.fix)]
