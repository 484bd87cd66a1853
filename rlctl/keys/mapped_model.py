"""A model on disk whose names a user's map explains."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import UsageError
from rlctl.keys.containers import Container
from rlctl.keys.custom_map import read_map
from rlctl.keys.families import known_model_types
from rlctl.keys.json_file import read_object
from rlctl.keys.model_spec import CONFIG_BYTES, ModelSpec
from rlctl.keys.named import open_names
from rlctl.keys.opened import Opened
from rlctl.keys.plan import PlanError
from rlctl.keys.schemes.hf import HF_DROPS, canonical_shapes
from rlctl.keys.schemes.mapped import mapped_layout
from rlctl.keys.stored_tensors import StoredTensors


def open_mapped(path: Path, map_file: Path, *, base: Path | None) -> Opened:
    """Open a model whose names the rules of ``map_file`` turn into Hugging Face names.

    A known architecture is held against its own names and shapes; of an unknown one only the map is checked.

    Raises UsageError for a map that cannot be read, PlanError where names collide or pieces do not fit.
    """
    rules = read_map(map_file)
    named = open_names(path)
    home = _home(named.container, base)
    spec = _known_spec(home)
    tensors = StoredTensors.of(named.base)
    known = canonical_shapes(spec) if spec else None
    mapped = mapped_layout(rules, tensors.infos, known, HF_DROPS)
    if mapped.findings:
        raise PlanError(f"{map_file} does not fit {path}", mapped.findings)
    if named.adapter:
        raise UsageError("a map does not go with a model inside PEFT", where=str(path))
    notes = list(named.notes)
    if spec is None:
        notes.append("the architecture is not known: names and shapes were checked against the map only")
    return Opened(
        named.container,
        spec,
        home,
        mapped.shapes,
        mapped.layout,
        [named.container.why, f"names by {map_file}"],
        tensors,
        named.raw,
        {},
        named.findings,
        notes,
        mapped.idle,
    )


def _home(container: Container, base: Path | None) -> Path:
    folders = [*([base] if base else []), *container.config_folders]
    return next((folder for folder in folders if (folder / "config.json").is_file()), container.config_folders[0])


def _known_spec(home: Path) -> ModelSpec | None:
    config = home / "config.json"
    if not config.is_file():
        return None
    if read_object(config, limit=CONFIG_BYTES).get("model_type") not in known_model_types():
        return None
    return ModelSpec.from_file(config)
