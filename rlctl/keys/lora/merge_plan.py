"""Which base tensors an adapter changes and how, from names and shapes alone (no torch, no data)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.errors import Finding, UsageError
from rlctl.keys.families import Experts
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.contents import Contents, Shapes
from rlctl.keys.lora.names import Part, parse_key
from rlctl.keys.lora.served import hint
from rlctl.keys.lora.sites import Sites, Update
from rlctl.keys.plan import PlanError

HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Change:
    """What becomes of one base tensor.

    Args:
        updates: low-rank products to add.
        magnitude: raw name of DoRA's m, or None; ``per_column`` when the outputs are the stored tensor's columns.
        replaced_by: raw name of a whole tensor that takes the base's place before the updates, or None.
        bias: raw name of a bias to add ``scale`` times, or None.
    """

    updates: tuple[Update, ...] = ()
    magnitude: str | None = None
    per_column: bool = False
    replaced_by: str | None = None
    bias: str | None = None
    scale: float = 0.0


@dataclass(frozen=True)
class MergePlan:
    """What a merge does.

    Args:
        changes: Hugging Face name -> change, for the base tensors that differ after the merge.
        unties: the merge tells a tied head and its embedding apart: the configuration must then say
            ``tie_word_embeddings: false``.
        new_head: change that makes ``lm_head.weight`` out of the embedding, where the base has no such tensor.
        embedding: Hugging Face name of the embedding, empty when there is none.
    """

    changes: Mapping[str, Change]
    unties: bool = False
    new_head: Change | None = None
    embedding: str = ""

    def touches(self, name: str) -> bool:
        """Whether the tensor of this Hugging Face name differs after the merge (all others can be copied)."""
        return name in self.changes


def plan_merge(
    contents: Contents,
    config: AdapterConfig,
    base: Shapes,
    *,
    moe: Experts | None = None,
    tied: bool | None = None,
    base_is_moved: bool = False,
    untie: bool = False,
) -> MergePlan:
    """Plan a merge into the base tensors named and shaped as ``base`` says.

    Args:
        contents: the adapter.
        config: its configuration.
        base: name -> shape; names may be wrapped or those of a model with adapters in it, the plan's are plain.
        moe: how the base names and stores its experts (``ModelSpec.moe``); needed where experts are adapted.
        tied: whether the base's configuration ties the head to the embedding; told by a missing head when None.
        base_is_moved: the base is the changed one that PiSSA and its kin trained on.
        untie: give a tied head a tensor of its own where the adapter tells head and embedding apart.

    Raises UsageError for an adapter that no addition to the weights can express, PlanError listing every adapted layer
    that the base does not have, or has in another shape.
    """
    refuse_unmergeable(config, base_is_moved=base_is_moved)
    shapes = {}
    for raw, shape in base.items():
        key = parse_key(raw)
        if key.part in (Part.BASE, Part.ORIGINAL):
            shapes[key.parameter] = shape
    sites = Sites(contents.modules, moe, transposed=config.fan_in_fan_out)
    biases = {f"{m.path}.bias": m for m in contents.modules if m.bias}
    changes = {}
    for name, shape in shapes.items():
        updates = sites.updates(name, shape)
        bias = biases.pop(name, None)
        change = Change(
            updates,
            magnitude=updates[0].module.magnitude if updates else None,
            per_column=bool(updates) and updates[0].transposed,
            replaced_by=contents.saved.get(name),
            bias=bias.bias if bias else None,
            scale=bias.scaling.value if bias else 0.0,
        )
        if change != Change():
            changes[name] = change
    findings = [
        *sites.faults,
        *(Finding(f"the base has no bias at {name}, which the adapter has one for") for name in biases),
    ]
    plan = _with_tied_head(contents, changes, shapes, tied, untie=untie)
    head_made = {HEAD, "lm_head"} if plan.new_head else set()
    for name, shape in contents.saved_shapes.items():
        if shapes.get(name, shape) != shape:
            fix = "was the vocabulary resized for training? Resize the base alike first" if "embed" in name else None
            findings.append(Finding(f"the adapter's own {name} is {shape}, the base's {shapes[name]}", fix=fix))
    wanted = [*(n for n in contents.saved if n not in shapes), *sites.unplaced()]
    findings += [Finding(f"the base has no {n}", fix=hint(n, shapes)) for n in wanted if n not in head_made]
    if findings:
        raise PlanError("the adapter does not fit the base", findings)
    return plan


def refuse_unmergeable(config: AdapterConfig, *, base_is_moved: bool = False) -> None:
    """Raise UsageError for an adapter whose effect is not ``W + s*B@A`` (or DoRA's) on the given base."""
    odd = config.not_plain()
    if odd:
        raise UsageError(f"cannot merge an adapter with {', '.join(odd)}")
    moved = config.base_moved_by()
    if moved and not base_is_moved:
        raise UsageError(
            f"{moved} changed the base weights when training began: the adapter does not fit the original base",
            fix="convert it with PEFT's path_initial_model_for_weight_conversion, or give the changed base and say so",
        )


def _with_tied_head(
    contents: Contents,
    changes: Mapping[str, Change],
    shapes: Shapes,
    tied: bool | None,
    *,
    untie: bool,
) -> MergePlan:
    """Deal with a head that has no tensor of its own: a merge must not change one of the two through the other."""
    embedding = next((n for n in shapes if n == _EMBEDDING or n.endswith(f".{_EMBEDDING}")), "")
    tied = HEAD not in shapes if tied is None else tied
    head = next((m for m in contents.modules if m.path == "lm_head"), None)
    alone = Change(
        (Update(head),) if head else (), head.magnitude if head else None, replaced_by=contents.saved.get(HEAD)
    )
    if not tied or not embedding or (alone == Change() and embedding not in changes):
        return MergePlan(changes, embedding=embedding)
    if not untie:
        what = "the output head" if alone != Change() else "the embedding"
        raise UsageError(
            f"the adapter changes {what} alone, but the base ties the head to the embedding ({embedding})",
            fix="allow untying: the merged model then has a head of its own and tie_word_embeddings false",
        )
    return MergePlan(changes, True, None if HEAD in shapes else alone, embedding)
