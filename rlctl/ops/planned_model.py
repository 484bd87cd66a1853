"""The model that a plan is made for, from whatever names it: a preset, a folder, a config.json, safetensors headers, a
hub name. Headers only are read, and nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.keys.checkpoint import Checkpoint
from rlctl.keys.json_file import JsonError
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset, preset_names, preset_of_hub_name
from rlctl.keys.tensor_file import TensorEntry, TensorFileError
from rlctl.registry import suggest
from rlctl.sync.weights import Split, Weight, model_weights
from rlctl.tasks.builtin_models import BUILTIN_MODELS, builtin_model_path

_CUT: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"), ("even", 0)),
    **dict.fromkeys(("o_proj", "down_proj"), ("even", 1)),
    **dict.fromkeys(("embed_tokens", "lm_head"), ("vocab", 0)),
}  # fmt: skip
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class PlannedModel:
    """A model on paper.

    Attributes:
        name: as the user wrote it.
        source: what its sizes were taken from.
        weights: its tensors, in the dtype they travel in.
        spec: its architecture; None when only the headers of its files are known.
        notes: what is not as the architecture says.
    """

    name: str
    source: str
    weights: tuple[Weight, ...]
    spec: ModelSpec | None = None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def planned_model(name: str, dtype: str | None = None, *, where: str = "--model") -> PlannedModel:
    """Return the model that ``name`` names.

    Args:
        name: a preset (``qwen3-8b``), a folder or config.json, a ``.safetensors`` file or its index, a hub name whose
            preset is known or whose config.json is in the local cache.
        dtype: safetensors code of the weights that travel; None: that of the files' headers, or of the configuration.
        where: what messages call its origin.

    Raises:
        UsageError: it is none of these, or its sizes cannot be used.
    """
    try:
        return _found(name, dtype, where)
    except (JsonError, TensorFileError) as error:
        raise UsageError(
            f"{name} cannot be used: {error.message}",
            where=error.where or where,
            fix="give the folder of a model in transformers' form, or copy or download it again",
        ) from error


def _found(name: str, dtype: str | None, where: str) -> PlannedModel:
    if (builtin := builtin_model_path(name)) is not None:
        return _of_path(name, builtin, dtype)
    path = Path(name).expanduser()
    if path.exists():
        return _of_path(name, path, dtype)
    if name.lower() in preset_names():
        return _of_spec(name, f"preset {name.lower()}", preset(name), dtype)
    if "/" in name and (known := preset_of_hub_name(name)) is not None:
        return _of_spec(name, f"preset {known}", preset(known), dtype)
    if (cached := _cached(name)) is not None:
        return _of_spec(name, "config.json of the local hub cache", ModelSpec.from_folder(cached), dtype)
    near = suggest(name, [*preset_names(), *BUILTIN_MODELS])
    raise UsageError(
        f"{name!r} is neither a file or folder, nor a preset, nor a model in the local hub cache",
        where=where,
        fix=f"{f'did you mean {near!r}? ' if near else ''}presets: {', '.join(preset_names())}",
    )


def _of_spec(name: str, source: str, spec: ModelSpec, dtype: str | None) -> PlannedModel:
    return PlannedModel(name, source, tuple(model_weights(spec, dtype or spec.dtype or "BF16")), spec)


def _of_path(name: str, path: Path, dtype: str | None) -> PlannedModel:
    if path.name.endswith(".json") and not path.name.endswith(".index.json"):
        return _of_spec(name, str(path), ModelSpec.from_file(path), dtype)
    config = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_dir() and config.is_file() and not any(path.glob("*.safetensors*")):
        return _of_spec(name, str(config), ModelSpec.from_file(config), dtype)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check()
        entries = list(checkpoint.entries.values())
    headers = f"{len(entries)} tensors of {path.name or path}"
    if config.is_file():
        planned = _of_spec(name, f"{config} and {headers}", ModelSpec.from_file(config), dtype)
        return _as_stored(planned, entries, dtype)
    note = "no config.json beside the files: heads are not known, so tensors are taken to divide evenly"
    return PlannedModel(name, headers, tuple(_of_header(entry, dtype) for entry in entries), notes=(note,))


def _as_stored(planned: PlannedModel, entries: Iterable[TensorEntry], dtype: str | None) -> PlannedModel:
    """Return the model with the dtypes and the tensors that its files have."""
    stored = {entry.name: entry for entry in entries}
    known = [weight for weight in planned.weights if weight.name in stored]
    weights = [weight if dtype else replace(weight, dtype=stored[weight.name].dtype) for weight in known]
    odd = [w.name for w in known if w.shape != stored[w.name].shape]
    if odd:
        raise UsageError(
            f"{odd[0]} is {list(stored[odd[0]].shape)} in the files, not as config.json implies",
            where=planned.name,
            fix="give the folder whose config.json and weights belong together",
        )
    extra = [_of_header(entry, dtype) for entry in stored.values() if entry.name not in {w.name for w in known}]
    notes = [
        f"{len(names)} tensors {what}, such as {names[0]}"
        for names, what in (
            ([w.name for w in planned.weights if w.name not in stored], "of the architecture are not in the files"),
            ([w.name for w in extra], "of the files are not known to the architecture"),
        )
        if names
    ]
    return replace(planned, weights=(*weights, *extra), notes=tuple(notes))


def _of_header(entry: TensorEntry, dtype: str | None) -> Weight:
    parts = entry.name.split(".")
    kind, dim = _CUT.get(parts[-2] if len(parts) > 1 else "", ("whole", 0))
    layer = _LAYER.search(entry.name)
    split = Split()
    if len(entry.shape) == 2 and kind != "whole":
        split = Split("vocab" if kind == "vocab" else "even", dim, entry.shape[dim])
    return Weight(
        entry.name,
        tuple(entry.shape),
        dtype or entry.dtype,
        split,
        layer=int(layer[1]) if layer else None,
        ends="first",
    )


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None  # no name that a hub could have
    return Path(found) if isinstance(found, str) else None
