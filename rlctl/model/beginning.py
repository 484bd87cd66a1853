"""Beginning with an adapter that was trained before, once it is known to be for this model and of this form."""

from __future__ import annotations

from pathlib import Path

import torch

from rlctl.errors import Finding, FindingsError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.contents import LoraModule
from rlctl.model.base_reference import read_base

WHERE = "model.lora.adapter"


def begin_with(folder: str, own: Adapter, *, base_digest: str) -> None:
    """Copy the adapter in ``folder`` into the model's ``own``, in place.

    Raises:
        FindingsError: it was trained on other weights, or has other modules, shapes or scaling than ``own``, or is
            more than plain LoRA; all that is wrong is listed, and nothing was copied.
        UsageError: the folder holds no sound adapter.
    """
    with Adapter.open(folder) as given:
        findings = [*_of_another_model(Path(folder), base_digest), *_not_plain(given), *_unlike(given, own)]
        if findings:
            raise FindingsError(f"the adapter in {folder} cannot be gone on from", findings)
        target = {module.path: module for module in own.contents.modules}
        with torch.no_grad():
            for module in given.contents.modules:
                mine = target[module.path]
                own.load(mine.a).copy_(given.load(module.a))
                own.load(mine.b).copy_(given.load(module.b))


def _of_another_model(folder: Path, digest: str) -> list[Finding]:
    base = read_base(folder)
    if base is None or base[1] == digest:
        return []
    return [Finding("it was trained on other weights than those of model.path", WHERE, f"set model.path={base[0]}")]


def _not_plain(given: Adapter) -> list[Finding]:
    config, contents = given.config, given.contents
    odd = [*config.not_plain(), *(["use_dora"] if config.use_dora else []), *contents.saved]
    odd += [f"bias of {module.path}" for module in contents.modules if module.bias]
    moved = config.base_moved_by()
    odd += [moved] if moved else []
    if not odd:
        return []
    fix = "fold it into its base (rlctl convert-keys --merge) and train the result"
    return [Finding(f"it is more than plain LoRA: {', '.join(odd[:4])}", WHERE, fix)]


def _unlike(given: Adapter, own: Adapter) -> list[Finding]:
    theirs = {module.path: module for module in given.contents.modules}
    mine = {module.path: module for module in own.contents.modules}
    if theirs.keys() != mine.keys():
        odd = sorted(theirs.keys() ^ mine.keys())
        side = "it lacks" if odd[0] in mine else "here none is on"
        names = ",".join(sorted({path.rpartition(".")[2] for path in theirs}))
        message = f"its modules are others, {len(odd)} of them; {side} {odd[0]}"
        return [Finding(message, "model.lora.target_modules", f"if the model is right, set it to [{names}]")]
    for path, module in theirs.items():
        if _sizes(module) != _sizes(mine[path]):
            message = f"{path} is {_words(module)} in it and {_words(mine[path])} here"
            return [Finding(message, WHERE, "give an adapter that was made for this model")]
        if module.scaling != mine[path].scaling:
            ours, scaling = mine[path].scaling, module.scaling
            message = f"{path} has rank {scaling.r}, scaling {scaling.value:g}; here {ours.r}, {ours.value:g}"
            fix = f"set model.lora.rank={scaling.r} model.lora.alpha={scaling.value * scaling.r:g}"
            return [Finding(message, "model.lora.rank", fix)]
    return []


def _sizes(module: LoraModule) -> tuple[str, int, int]:
    return module.kind, module.outputs, module.inputs


def _words(module: LoraModule) -> str:
    return f"{module.kind} {module.outputs} x {module.inputs}"
