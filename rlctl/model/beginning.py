"""Beginning with an adapter that was trained before, once it is known to be for this model and of this form."""

from __future__ import annotations

from pathlib import Path

import torch

from rlctl.errors import Finding, FindingsError
from rlctl.keys.lora.adapter import Adapter
from rlctl.model.adapter_faults import ADAPTER, base_name_fault, begin_faults
from rlctl.model.base_reference import read_base


def begin_with(folder: str, own: Adapter, *, model: str, base_digest: str) -> None:
    """Copy the adapter in ``folder`` into the model's ``own``, in place.

    Args:
        folder: of the adapter.
        own: to write to.
        model: folder or hub name of the model under ``own``.
        base_digest: of that model.

    Raises:
        FindingsError: it was trained on other weights, or has other modules, shapes or scaling than ``own``, or is
            of a form that is not trained; all that is wrong is listed, and nothing was copied.
        UsageError: the folder holds no sound adapter.
    """
    with Adapter.open(folder) as given:
        findings = [
            *_of_another_model(given, Path(folder), model, base_digest),
            *begin_faults(given.config, given.contents, own.contents),
        ]
        if findings:
            raise FindingsError(f"the adapter in {folder} cannot be gone on from", findings)
        target = {module.site: module for module in own.contents.modules}
        with torch.no_grad():
            for module in given.contents.modules:
                mine = target[module.site]
                own.load(mine.a).copy_(given.load(module.a))
                own.load(mine.b).copy_(given.load(module.b))
                if module.magnitude is not None and mine.magnitude is not None:
                    own.load(mine.magnitude).copy_(given.load(module.magnitude))


def _of_another_model(given: Adapter, folder: Path, model: str, digest: str) -> list[Finding]:
    """By its base's digest where it has one, else by its base's name."""
    base = read_base(folder)
    if base is None:
        named = base_name_fault(given.config, model)
        return [named] if named else []
    if base[1] == digest:
        return []
    return [Finding("it was trained on other weights than those of model.path", ADAPTER, f"set model.path={base[0]}")]
