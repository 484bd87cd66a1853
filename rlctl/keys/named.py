"""Checkpoints with the names that their tensors would have without the wrappers of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import Finding
from rlctl.keys import wrappers
from rlctl.keys.containers import Container, open_container
from rlctl.keys.layout import Ref
from rlctl.keys.peft_model import has_adapters, part
from rlctl.keys.pieces import PiecedTensor
from rlctl.keys.tensor_file import TensorEntry

# Keys under which training states hold the model, and how the names of models start.
STATE_KEYS = ("app.model.", "model_state_dict.", "state_dict.", "model.")
_STARTS = (
    "model.layers.", "model.embed_tokens.", "lm_head.", "base_model.model.", "model.language_model.",
    "decoder.layers.", "_orig_mod.", "_fsdp_wrapped_module.", "module.",
)  # fmt: skip


@dataclass
class Named:
    """Opened files with clean names, those of PEFT's adapters apart."""

    container: Container
    base: dict[Ref, TensorEntry | PiecedTensor]
    adapter: dict[Ref, TensorEntry | PiecedTensor]
    raw: dict[Ref, str]
    findings: list[Finding]
    notes: list[str]


def open_names(path: Path) -> Named:
    """Open what lies at ``path`` and take wrapper segments and PEFT's wrappers out of its names."""
    container = open_container(path)
    found = Named(container, {}, {}, {}, list(container.findings), list(container.notes))
    by_shard: dict[str, list[str]] = {}
    for ref in container.tensors:
        by_shard.setdefault(ref.shard, []).append(ref.name)
    stripped = 0
    for shard, names in by_shard.items():
        cleaned = wrappers.clean_names(names)
        stripped += cleaned.stripped
        found.findings += cleaned.findings
        for name, clean in cleaned.clean.items():
            found.base.setdefault(Ref(clean, shard), container.tensors[Ref(name, shard)])
            if clean != name:
                found.raw[Ref(clean, shard)] = name
    _leave_state(found)
    if stripped:
        found.notes.append(f"{stripped} keys stripped of wrapper segments (torch.compile, FSDP, DDP, checkpointing)")
    if container.kind != "adapter" and has_adapters(found.base):
        parted = part(found.base)
        found.findings += parted.findings
        found.raw = {ref: found.raw.get(Ref(name, ref.shard), name) for ref, name in parted.origin.items()}
        found.base, found.adapter = parted.base, parted.adapter
    return found


def _leave_state(found: Named) -> None:
    """Take off the key under which a training state held the model (``model.model.layers...``, ``app.model...``)."""
    if found.container.kind == "megatron":
        return
    key = next((k for k in STATE_KEYS for ref in found.base if ref.name.startswith(tuple(k + s for s in _STARTS))), "")
    if not key:
        return
    taken: dict[Ref, TensorEntry | PiecedTensor] = {}
    for ref, tensor in found.base.items():
        bare = Ref(wrappers.strip(ref.name.removeprefix(key)), ref.shard)
        if bare in taken:
            found.findings.append(Finding(f"becomes {bare}, as another name does", str(ref)))
        taken[bare] = tensor
        if bare != ref:
            found.raw[bare] = found.raw.pop(ref, ref.name)
    found.base = taken
    found.notes.append(f"the model lies under {key.rstrip('.')!r} of a training state")
