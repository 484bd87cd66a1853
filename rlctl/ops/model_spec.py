"""The architecture of the model that a configuration names, without loading it."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import UsageError
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset, preset_names
from rlctl.tasks.builtin_models import builtin_model_path


def spec_of(path: str) -> ModelSpec:
    """Return the spec of ``model.path``: a folder, a config.json, a preset, the built-in model, or a hub name that a
    preset stands for (``Qwen/Qwen3-8B``: ``qwen3-8b``).

    Raises UsageError when none of these is there.
    """
    builtin = builtin_model_path(path)
    if builtin is not None:
        return ModelSpec.from_folder(builtin)
    if Path(path).expanduser().exists():
        return ModelSpec.from_folder(Path(path).expanduser())
    known = preset_names()
    name = path.rpartition("/")[2].lower()
    for candidate in (name, name.removesuffix("-instruct"), name.removesuffix("-base")):
        if candidate in known:
            return preset(candidate)
    if path.count("/") == 1:
        raise UsageError(
            f"the sizes of {path} are not known here",
            where="model.path",
            fix=f"give its folder or config.json, or a preset: {', '.join(known)}",
        )
    return preset(path)
