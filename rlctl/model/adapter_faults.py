"""What keeps an adapter from being trained on a model, or begun with, as far as names, shapes and settings tell.

No torch here: a wrong adapter is told before anything slow is imported, and by a dry run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlctl.errors import Finding
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import Contents, LoraModule
from rlctl.keys.lora.patterns import unmatched_targets
from rlctl.registry import suggest

ALL_LINEAR = "all-linear"
ADAPTER, TARGETS = "model.lora.adapter", "model.lora.target_modules"


def target_fault(layers: Sequence[str], stacked: Iterable[str], wanted: Sequence[str]) -> Finding | None:
    """Return what is wrong with ``model.lora.target_modules``.

    Args:
        layers: paths of the linear and embedding modules.
        stacked: names of parameters that hold many experts' weights in one tensor.
        wanted: the configured value.
    """
    if list(wanted) == [ALL_LINEAR]:
        return None
    paths = [*layers, *stacked]
    missing = unmatched_targets(wanted, paths)
    if not missing:
        return None
    names = sorted({path.rpartition(".")[2] for path in paths})
    near = suggest(missing[0], names)
    guess = f"is it {near!r}? " if near else ""
    here = f"linear, embedding and expert weights here: {', '.join(names)}; or [{ALL_LINEAR}]"
    return Finding(f"no module of the model is named {', '.join(missing)}", TARGETS, f"{guess}{here}")


def begin_faults(config: AdapterConfig, given: Contents, own: Contents) -> list[Finding]:
    """Return why an adapter cannot be gone on from in place of ``own``: of a form that is not trained, or unlike it."""
    return [*_not_plain(config, given), *_unlike(config, given, own)]


def base_name_fault(config: AdapterConfig, model: str) -> Finding | None:
    """Return a finding when an adapter says that it is for a model of another name than ``model`` (folder or hub name).

    Names count as one when the last part of either is a part of the other, whatever the case: ``org/Name``,
    ``/models/name`` and the hub's cache ``models--org--Name/snapshots/...`` do.
    """
    named = config.base_model_name_or_path
    if not named or _parts(named)[-1] in _parts(model) or _parts(model)[-1] in _parts(named):
        return None
    fix = f"set model.path={named}, or, if {model} is that model, write so as base_model_name_or_path"
    return Finding(f"it says that it was trained on {named}", ADAPTER, fix)


def _parts(name: str) -> list[str]:
    return re.split(r"/|--", name.lower().rstrip("/"))


def _not_plain(config: AdapterConfig, given: Contents) -> list[Finding]:
    odd = [*config.not_plain(), *given.saved]
    odd += [f"bias of {module.path}" for module in given.modules if module.bias]
    moved = config.base_moved_by()
    odd += [moved] if moved else []
    if not odd:
        return []
    fix = "fold it into its base (rlctl convert-keys --merge) and train the result"
    return [Finding(f"its form is not one that is trained: {', '.join(odd[:4])}", ADAPTER, fix)]


def _unlike(config: AdapterConfig, given: Contents, own: Contents) -> list[Finding]:
    theirs = {module.site: module for module in given.modules}
    mine = {module.site: module for module in own.modules}
    if theirs.keys() != mine.keys():
        odd = sorted(theirs.keys() ^ mine.keys())
        side = "it lacks" if odd[0] in mine else "here none is on"
        names = ",".join(sorted({path.rpartition(".")[2] for path in theirs}))
        message = f"its modules are others, {len(odd)} of them; {side} {odd[0]}"
        return [Finding(message, TARGETS, f"if the model is right, set it to [{names}]")]
    for path, module in theirs.items():
        if _sizes(module) != _sizes(mine[path]):
            message = f"{path} is {_words(module)} in it and {_words(mine[path])} here"
            return [Finding(message, ADAPTER, "give an adapter that was made for this model")]
        if (module.magnitude is None) != (mine[path].magnitude is None):
            words = ("it is DoRA, and the run's is not", "it is not DoRA, and the run's is")[module.magnitude is None]
            return [Finding(words, "model.lora.use_dora", f"set model.lora.use_dora={str(config.use_dora).lower()}")]
        if module.scaling.r != mine[path].scaling.r or module.scaling.value != mine[path].scaling.value:
            ours, scaling = mine[path].scaling, module.scaling
            message = f"{path} has rank {scaling.r}, scaling {scaling.value:g}; here {ours.r}, {ours.value:g}"
            fix = f"set model.lora.rank={scaling.r} model.lora.alpha={scaling.alpha:g}"
            fix += f" model.lora.use_rslora={str(config.use_rslora).lower()}"
            return [Finding(message, "model.lora.rank", fix)]
    return []


def _sizes(module: LoraModule) -> tuple[str, int, int, int]:
    return module.kind, module.experts, module.outputs, module.inputs


def _words(module: LoraModule) -> str:
    return f"{module.kind} {module.outputs} x {module.inputs}"
