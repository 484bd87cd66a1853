"""What an adapter holds, from its configuration and the names and shapes of its tensors alone (no torch, no data)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlctl.errors import CheckError, Finding
from rlctl.keys import wrappers
from rlctl.keys.lora.config import AdapterConfig, Scaling
from rlctl.keys.lora.names import AdapterKey, Part, format_key, parse_key
from rlctl.keys.plan import PlanError

Shapes = Mapping[str, tuple[int, ...]]
Kind = Literal["linear", "embedding", "experts"]

_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")  # as the experts module registers them, the innermost wrapper first
_EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT writes these whole when the vocabulary was resized


@dataclass(frozen=True)
class LoraModule:
    """One adapted layer.

    Args:
        path: its module in the Hugging Face model.
        kind: linear, embedding, or a stack of experts in one parameter.
        parameter: the adapted parameter when it was named as such (``gate_up_proj``, or ``weight`` of a router).
        a, b: raw names of A and B; ``magnitude`` and ``bias`` those of DoRA's m and of B's bias, or None.
        scaling: effective rank, alpha and scaling.
        inputs, outputs: features of one expert, or of the layer; for an embedding the vocabulary and the width.
        experts: stacked experts, 1 for the other kinds.
    """

    path: str
    kind: Kind
    parameter: str | None
    a: str
    b: str
    scaling: Scaling
    inputs: int
    outputs: int
    experts: int = 1
    magnitude: str | None = None
    bias: str | None = None
    depth: int = 0

    @property
    def site(self) -> str:
        """The path that the patterns of the configuration are matched against."""
        return f"{self.path}.{self.parameter}" if self.parameter else self.path


@dataclass(frozen=True)
class Contents:
    """The sorted-out adapter.

    Args:
        modules: every adapted layer, in the order of first appearance.
        saved: Hugging Face parameter -> raw name of a whole tensor that replaces the base's (``modules_to_save``,
            trained biases, resized embeddings); ``saved_shapes`` are their shapes.
        dropped: (raw name, reason) of tensors that are not part of this adapter.
        in_model: the names carry an adapter's name, as in a live model.
        stripped: how many names carried segments of torch.compile, FSDP, DDP or DeepSpeed.
    """

    modules: tuple[LoraModule, ...]
    saved: Mapping[str, str]
    saved_shapes: Mapping[str, tuple[int, ...]]
    dropped: tuple[tuple[str, str], ...] = ()
    in_model: bool = False
    stripped: int = 0


@dataclass
class _Group:
    """The raw names found for one wrapper: part -> name."""

    path: str
    depth: int
    names: dict[Part, str] = field(default_factory=dict)


def check_file_names(names: Iterable[str]) -> None:
    """Raise CheckError when PEFT would not find every one of ``names`` of an adapter file under its own name.

    PEFT only warns about such keys and leaves B at zero, so the adapter silently does nothing.
    """
    known = list(names)
    wrong = [name for name in known if not _is_file_name(name)]
    if wrong:
        raise CheckError(
            f"{len(known) - len(wrong)} of {len(known)} keys match the names that PEFT loads; not {wrong[0]!r}",
            fix="rewrite the adapter with canonical names before using it",
        )


def read_contents(shapes: Shapes, config: AdapterConfig, *, adapter: str | None = None) -> Contents:
    """Sort the tensors of an adapter file or of a model with adapters in it.

    Args:
        shapes: raw name -> shape.
        config: the adapter's configuration.
        adapter: the adapter to take out of a model that holds several; its only one, or ``default``, when None.

    Raises PlanError listing every fault: colliding or unknown names, A without B, ungathered or misfitting shapes,
    missing magnitudes, and an empty adapter.
    """
    keys = {raw: parse_key(raw) for raw in shapes}
    stripped = sum(wrappers.strip(raw) != raw for raw in shapes)
    findings: list[Finding] = []
    named = {k.adapter for k in keys.values() if k.adapter is not None}
    chosen = _choose(named, adapter, findings)
    groups: dict[tuple[str, int], _Group] = {}
    saved: dict[str, str] = {}
    dropped: list[tuple[str, str]] = []
    for raw, key in keys.items():
        reason = _not_ours(key, chosen)
        if reason is None and key.part in (Part.BASE, Part.SAVED):
            if key.part is Part.BASE and not _is_whole(key, config, in_model=bool(named)):
                reason = "base weight" if named else None
                if reason is None:
                    findings.append(Finding(f"unknown tensor {raw!r}", fix="neither LoRA nor in modules_to_save"))
                    continue
            elif key.parameter in saved:
                findings.append(Finding(f"{raw!r} and {saved[key.parameter]!r} are one parameter: {key.parameter}"))
            else:
                saved[key.parameter] = raw
        elif reason is None and key.part in (Part.UNKNOWN, Part.TOKENS):
            fix = "trainable_token_indices are not supported" if key.part is Part.TOKENS else None
            findings.append(Finding(f"unknown adapter tensor {raw!r}", fix=fix))
        elif reason is None:
            group = groups.setdefault((key.path, key.depth), _Group(key.path, key.depth))
            if key.part in group.names:
                findings.append(Finding(f"{raw!r} and {group.names[key.part]!r} are one tensor once cleaned"))
            group.names[key.part] = raw
        if reason is not None:
            dropped.append((raw, reason))
    modules = _modules(groups, shapes, config, findings)
    if not modules and not saved and not findings:
        findings.append(Finding(f"0 of {len(shapes)} keys are LoRA tensors"))
    if findings:
        raise PlanError("the adapter is not sound", findings)
    saved_shapes = {name: tuple(shapes[raw]) for name, raw in saved.items()}
    return Contents(tuple(modules), saved, saved_shapes, tuple(dropped), bool(named), stripped)


def _is_file_name(name: str) -> bool:
    key = parse_key(name)
    if key.part is Part.BASE:
        return wrappers.strip(name) == name
    return key.part not in (Part.UNKNOWN, Part.ORIGINAL, Part.TOKENS) and format_key(key, "peft-file") == name


def _choose(named: set[str], adapter: str | None, findings: list[Finding]) -> str | None:
    if adapter is None:
        adapter = "default" if "default" in named else None if len(named) != 1 else next(iter(named))
    if named and adapter not in named:
        which = f"no adapter {adapter!r}" if adapter else "several adapters"
        findings.append(Finding(f"{which} in the model", fix=f"name one of {', '.join(sorted(named))}"))
    return adapter


def _not_ours(key: AdapterKey, chosen: str | None) -> str | None:
    if key.part is Part.ORIGINAL:
        return "frozen original of a module in modules_to_save"
    if key.adapter is not None and key.adapter != chosen:
        return f"belongs to adapter {key.adapter!r}"
    return None


def _is_whole(key: AdapterKey, config: AdapterConfig, *, in_model: bool) -> bool:
    """Whether a plain parameter among an adapter's tensors replaces the base's."""
    if key.leaf == "bias" and (config.bias == "all" or (config.bias == "lora_only" and (key.depth or not in_model))):
        return True
    if in_model:
        return False
    return any(f".{name}." in f".{key.path}." for name in (*config.modules_to_save, *_EMBEDDINGS))


def _modules(
    groups: Mapping[tuple[str, int], _Group], shapes: Shapes, config: AdapterConfig, findings: list[Finding]
) -> list[LoraModule]:
    depths: dict[str, set[int]] = {}
    for path, depth in groups:
        depths.setdefault(path, set()).add(depth)
    parameters = {path: _parameters(path, found, config, findings) for path, found in depths.items()}
    modules = []
    for (path, depth), group in groups.items():
        named = parameters[path]
        parameter = named.get(depth)
        if parameter is None and depth:
            continue  # reported with its path
        module = _module(group, parameter, shapes, config, findings)
        if module is not None:
            modules.append(module)
    return modules


def _parameters(path: str, depths: set[int], config: AdapterConfig, findings: list[Finding]) -> dict[int, str]:
    """Return wrapper depth -> parameter of the module at ``path``, empty for an ordinary layer.

    Wrappers nest in the order in which the module registers its parameters, so the last one is the outermost.
    """
    listed = {t.rpartition(".")[2] for t in config.target_parameters if _names_module(t, path)}
    if not listed and depths == {0}:
        if path.endswith(".experts"):
            findings.append(Finding(f"{path}: which expert tensor is adapted?", fix="name it in target_parameters"))
        return {}
    if len(listed) == 1 and depths == {0}:
        return {0: listed.pop()}
    if listed <= set(_EXPERT_PARAMETERS) and depths == {0, 1}:
        return dict(zip((1, 0), _EXPERT_PARAMETERS, strict=True))
    wanted = ", ".join(sorted(listed)) or "nothing"
    findings.append(
        Finding(f"{path}: target_parameters name {wanted} here, but wrappers at depths {sorted(depths)} were found")
    )
    return {}


def _names_module(target: str, path: str) -> bool:
    container, _, _ = target.rpartition(".")
    if not container:
        return path.endswith(".experts")
    return path == container or path.endswith(f".{container}")


def _module(
    group: _Group, parameter: str | None, shapes: Shapes, config: AdapterConfig, findings: list[Finding]
) -> LoraModule | None:
    names = group.names
    embedding = Part.EMBEDDING_A in names or Part.EMBEDDING_B in names
    pair = (Part.EMBEDDING_A, Part.EMBEDDING_B) if embedding else (Part.A, Part.B)
    missing = [part.value for part in pair if part not in names]
    if missing:
        findings.append(Finding(f"{group.path}: {', '.join(missing)} is missing beside {next(iter(names.values()))!r}"))
        return None
    a, b = (names[part] for part in pair)
    flat = [f"{name} {shapes[name]}" for name in (a, b) if len(shapes[name]) != 2 or 0 in shapes[name]]
    if flat:
        hint = "gather before save: these are pieces of ZeRO-3 or FSDP shards, or empty"
        findings.append(Finding(f"{' and '.join(flat)} should be matrices", fix=hint))
        return None
    scaling = config.scaling(f"{group.path}.{parameter}" if parameter else group.path)
    experts = shapes[a][0] // scaling.r if parameter in _EXPERT_PARAMETERS else 1
    if shapes[a][0] != experts * scaling.r or shapes[b][1] != experts * scaling.r:
        findings.append(
            Finding(
                f"{a} {shapes[a]} and {b} {shapes[b]} do not have the configured rank {scaling.r}",
                fix="check r and rank_pattern of adapter_config.json",
            )
        )
        return None
    kind: Kind = "embedding" if embedding else "experts" if parameter in _EXPERT_PARAMETERS else "linear"
    module = LoraModule(
        group.path, kind, parameter, a, b, scaling, shapes[a][1], shapes[b][0], experts,
        names.get(Part.MAGNITUDE), names.get(Part.B_BIAS), group.depth,
    )  # fmt: skip
    return _with_magnitude(module, shapes, config, findings)


def _with_magnitude(
    module: LoraModule, shapes: Shapes, config: AdapterConfig, findings: list[Finding]
) -> LoraModule | None:
    name = module.magnitude
    if name is None:
        if config.use_dora:
            findings.append(Finding(f"{module.path}: use_dora is set but lora_magnitude_vector is missing"))
            return None
        return module
    if not config.use_dora:
        findings.append(Finding(f"{name} is a DoRA magnitude but use_dora is not set"))
        return None
    if module.kind == "experts":
        findings.append(Finding(f"{name}: DoRA does not apply to stacked experts"))
        return None
    if shapes[name] != (module.outputs,):
        fix = "gather before save" if shapes[name] == (0,) else None
        findings.append(Finding(f"{name} {shapes[name]} should have {module.outputs} elements", fix=fix))
        return None
    return module
