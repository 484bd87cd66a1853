"""A model on disk, understood: its configuration, the scheme of its names, and where every tensor lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import Finding, UsageError
from rlctl.keys.containers import Container
from rlctl.keys.json_file import read_object
from rlctl.keys.layout import Layout, Ref
from rlctl.keys.model_spec import CONFIG_BYTES, ModelSpec
from rlctl.keys.named import open_names
from rlctl.keys.pieces import PiecedTensor
from rlctl.keys.plan import PlanError
from rlctl.keys.schemes.block_scales import scale_shapes
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.schemes.megatron_dist import megatron_dist_layout
from rlctl.keys.schemes.recognise import Build, recognise
from rlctl.keys.schemes.vllm import vllm_layout
from rlctl.keys.schemes.vllm_names import vllm_names_layout
from rlctl.keys.shapes import Shapes
from rlctl.keys.stored_tensors import StoredTensors
from rlctl.keys.tensor_file import TensorEntry

SOURCE_SCHEMES = ("hf", "hf-fused", "megatron", "megatron-dist", "vllm", "vllm-runtime")
# What people call a source by its files; its names are then told by themselves.
BY_FILES = {"dcp": ("dcp",), "fsdp": ("dcp", "rank-files", "model", "torch-file", "file")}
TIED_NOTE = "the head is tied to the embedding"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass
class Opened:
    """A model on disk.

    Args:
        container: its files.
        spec: its architecture and sizes; None only for a model that a user's map alone describes.
        config_folder: the folder of its config.json, whose other files go along.
        shapes: its canonical tensors.
        layout: the scheme of its names.
        why: what container and scheme were told by.
        tensors: where its tensors lie, by clean name.
        raw: clean name -> name in the files, where they differ.
        adapter: tensors of PEFT adapters in the model, by clean name.
        findings: faults of files and names.
        notes: what a user should know.
        warnings: what is an error under ``--strict``.
        quantised: its weights are fp8 with scales for blocks.
    """

    container: Container
    spec: ModelSpec | None
    config_folder: Path
    shapes: Shapes
    layout: Layout
    why: list[str]
    tensors: StoredTensors
    raw: dict[Ref, str] = field(default_factory=dict)
    adapter: dict[Ref, TensorEntry | PiecedTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    quantised: bool = False

    @property
    def known(self) -> ModelSpec:
        """The architecture. Raises UsageError when only a map describes the model."""
        if self.spec is None:
            fix = "without a known architecture a map leads to --to hf only"
            raise UsageError("the model's architecture is not known", where=str(self.container.path), fix=fix)
        return self.spec

    @property
    def mtp(self) -> bool:
        """Whether the file holds the multi-token-prediction layers."""
        return has_mtp(self.known, self.tensors.infos)

    @property
    def scheme(self) -> str:
        """Name of the scheme of its names."""
        return self.layout.scheme


def open_model(
    path: Path, *, scheme: str = "auto", base: Path | None = None, sizes: Mapping[str, int | None] | None = None
) -> Opened:
    """Open a model and recognise its names.

    Args:
        path: a folder or a file.
        scheme: one of ``SOURCE_SCHEMES`` or ``BY_FILES``, or ``auto``.
        base: a folder with the config.json, where ``path`` has none.
        sizes: ``tp``, ``pp``, ``ep`` of Megatron rank folders that do not say them.

    Faults of the files and of the names become findings. Raises UsageError when nothing known lies there, when the
    model_type is unknown, or when the scheme cannot be told.
    """
    known = ("auto", *SOURCE_SCHEMES, *BY_FILES)
    if scheme not in known:
        raise UsageError(f"unknown scheme {scheme!r}", where="--from", fix=f"known: {', '.join(known)}")
    named = open_names(path)
    container = named.container
    if scheme in BY_FILES:
        if container.kind not in BY_FILES[scheme]:
            raise UsageError(f"is {container.why}, not {scheme}", where=str(path), fix="leave --from out")
        scheme = "auto"
    config_folder = config_folder_of(container, base)
    spec = ModelSpec.from_folder(config_folder)
    tensors = StoredTensors.of(named.base)
    shapes = canonical_shapes(spec, mtp=has_mtp(spec, tensors.infos))
    scales = _scales(config_folder, shapes, tensors)
    shapes |= scales
    candidates = _candidates(spec, shapes, container, tensors, sizes or {})
    if scheme != "auto":
        if scheme not in candidates:
            raise UsageError(f"{container.why} holds no {scheme} names", where=str(path), fix="leave --from out")
        candidates = {scheme: candidates[scheme]}
    try:
        found = recognise(set(tensors.infos), candidates, where=str(path))
    except UsageError as error:
        if not named.findings:
            raise
        # Files that are damaged are the likelier reason why their names make no sense.
        named.findings.append(Finding(error.message))
        raise PlanError(f"{path} is damaged", named.findings) from error
    return Opened(
        container,
        spec,
        config_folder,
        shapes,
        found.layout,
        [container.why, found.why],
        tensors,
        named.raw,
        named.adapter,
        named.findings,
        [*named.notes, *([TIED_NOTE] if spec.tied else [])],
        quantised=bool(scales),
    )


def config_folder_of(container: Container, base: Path | None) -> Path:
    """Return the folder with the model's config.json. Raises UsageError when there is none."""
    for folder in [*([base] if base else []), *container.config_folders]:
        if (folder / "config.json").is_file():
            return folder
    raise UsageError(
        "no config.json: the sizes of heads and experts are needed",
        where=str(container.path),
        fix="give the folder that holds it with --base",
    )


def _scales(config_folder: Path, shapes: Shapes, tensors: StoredTensors) -> Shapes:
    path = config_folder / "config.json"
    names = {ref.name for ref in tensors.infos}
    return scale_shapes(read_object(path, limit=CONFIG_BYTES), shapes, names, where=str(path))


def has_mtp(spec: ModelSpec, names: Mapping[Ref, object]) -> bool:
    """Tell whether the file holds the multi-token-prediction layers, which follow the last layer."""
    if not spec.mtp_layers:
        return False
    numbers = (match for ref in names if (match := _LAYER.match(ref.name)))
    return any(ref.name.startswith("mtp.layers.") for ref in names) or any(int(n[1]) >= spec.layers for n in numbers)


def _candidates(
    spec: ModelSpec, shapes: Shapes, container: Container, tensors: StoredTensors, sizes: Mapping[str, int | None]
) -> dict[str, Build]:
    if container.kind == "megatron":
        grid = _grid(spec, container, tensors, sizes)
        return {"megatron": lambda: megatron_layout(spec, shapes, grid)}
    names = {ref.name for ref in tensors.infos}
    candidates: dict[str, Build] = {
        "hf": lambda: hf_layout(spec, shapes),
        "hf-fused": lambda: fused_layout(spec, shapes),
        "vllm": lambda: vllm_names_layout(spec, shapes),
        "vllm-runtime": lambda: vllm_layout(spec, shapes),
    }
    padded = tensors.infos.get(Ref("embedding.word_embeddings.weight"))
    if padded is not None:
        stacked = not any(name.startswith("decoder.layers.0.") for name in names)
        candidates["megatron-dist"] = lambda: megatron_dist_layout(
            spec, shapes, padded_vocab=padded.shape[0] if padded.shape else 0, stacked=stacked
        )
    return candidates


def _grid(spec: ModelSpec, container: Container, tensors: StoredTensors, wanted: Mapping[str, int | None]) -> Grid:
    """Return how Megatron rank folders are cut: as the files say, or where they do not, as the user says."""
    known = {size: value for size, (value, _) in container.sizes.items()}
    second = container.facts.get("second")
    if isinstance(second, int) and not {"pp", "ep"} & known.keys():
        if not spec.experts:
            known |= {"pp": second, "ep": 1}
        elif wanted.get("pp") and wanted.get("ep"):
            known |= {"pp": int(wanted["pp"] or 1), "ep": int(wanted["ep"] or 1)}
        else:
            raise UsageError(
                f"{second} folders a tensor-parallel rank may be pipeline stages or expert ranks",
                where=str(container.path),
                fix="say --pp and --ep",
            )
    for size, value in wanted.items():
        if value and known.get(size, value) != value:
            place = container.sizes.get(size, (0, "the folder names"))[1]
            raise UsageError(f"--{size} {value}, but {place} says {known[size]}", where=str(container.path))
    tp = known.get("tp", 1)
    embedding = next((i for r, i in tensors.infos.items() if r.name == "embedding.word_embeddings.weight"), None)
    padded = embedding.shape[0] * tp if embedding is not None and embedding.shape else None
    sign = ".self_attention.kv_layernorm.weight" if spec.mla else ".input_layernorm.weight"
    local = any(ref.name.endswith(sign) for ref in tensors.infos)
    return Grid(tp, known.get("pp", 1), known.get("ep", 1), "local" if local else "te", padded_vocab=padded)
