"""Name segments that training wrappers put into parameter names, and their removal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlctl.errors import Finding

# Added at any depth by FSDP1, by activation checkpointing and by torch.compile.
ANYWHERE = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# Added in front by DDP, DeepSpeed and Megatron; further in it may be a real submodule.
IN_FRONT = "module"
FLAT = "_flat_param"


@dataclass(frozen=True)
class Cleaned:
    """Names without wrapper segments.

    Args:
        clean: name as found -> clean name.
        stripped: how many names had a segment removed.
        findings: two names that become one, and names that hold no tensor of their own.
    """

    clean: Mapping[str, str]
    stripped: int
    findings: list[Finding] = field(default_factory=list)


def strip(name: str) -> str:
    """Return ``name`` without wrapper segments."""
    segments = [segment for segment in name.split(".") if segment not in ANYWHERE]
    first = 0
    while first < len(segments) - 1 and segments[first] == IN_FRONT:
        first += 1
    return ".".join(segments[first:])


def clean_names(names: Iterable[str]) -> Cleaned:
    """Return every name cleaned, with what stands in the way as findings.

    Flat FSDP1 parameters (``use_orig_params=False``) hold many tensors without saying where one ends; they are
    findings, never guessed at.
    """
    clean: dict[str, str] = {}
    origin: dict[str, str] = {}
    findings: list[Finding] = []
    stripped = 0
    for name in names:
        bare = strip(name)
        stripped += bare != name
        if bare.rpartition(".")[2].startswith(FLAT):
            fix = "save a full state dict (FSDP.state_dict_type FULL_STATE_DICT), or train with use_orig_params=True"
            findings.append(Finding("a flat FSDP1 parameter has no per-tensor data", name, fix))
        elif bare in origin:
            findings.append(Finding(f"becomes {bare}, as {origin[bare]} does", name))
        origin.setdefault(bare, name)
        clean[name] = bare
    return Cleaned(clean, stripped, findings)
