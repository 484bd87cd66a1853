"""Would an adapter act at all where it is to be served? Names that the server does not adapt are skipped in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlctl.errors import CheckError
from rlctl.registry import suggest

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules that vLLM packs, and the adapters that they take."""

_SYNONYMS = {
    "unembed_tokens": "lm_head",
    "unembed": "lm_head",
    "embed_out": "lm_head",
    "output_layer": "lm_head",
    "word_embeddings": "embed_tokens",
    "wte": "embed_tokens",
}


def check_served(paths: Iterable[str], targets: Sequence[str], *, packed: Mapping[str, Sequence[str]] = PACKED) -> None:
    """Raise CheckError unless every adapted module is one that the server adapts.

    Args:
        paths: adapted modules, as in the Hugging Face model.
        targets: the server's target modules: last names or whole paths; a packed one (``qkv_proj``) admits its parts.
        packed: packed module -> its parts.
    """
    admitted = {*targets, *(part for target in targets for part in packed.get(target, ()))}
    known = list(paths)
    idle = [path for path in known if path not in admitted and path.rpartition(".")[2] not in admitted]
    if idle:
        fix = hint(idle[0], admitted) or f"the server adapts {', '.join(sorted(targets))}"
        shown = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        raise CheckError(
            f"{len(known) - len(idle)} of {len(known)} adapter modules are active; not {shown}",
            fix=fix,
        )


def hint(path: str, known: Iterable[str]) -> str | None:
    """Return what ``path`` may have been meant to be, given the modules or parameters that there are."""
    last = path.removesuffix(".weight").rpartition(".")[2]
    modules = sorted({name.removesuffix(".weight") for name in known})
    synonym = _SYNONYMS.get(last)
    if synonym is not None:
        found = next((m for m in modules if m == synonym or m.endswith(f".{synonym}")), synonym)
        return f"is it {found!r}?"
    near = suggest(path.removesuffix(".weight"), modules) or suggest(last, {m.rpartition(".")[2] for m in modules})
    return f"is it {near!r}?" if near else None
