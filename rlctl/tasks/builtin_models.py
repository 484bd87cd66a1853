"""Models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"
BUILTIN_MODELS = {"cycle-tiny": "cycle"}


def builtin_model_path(name: str) -> Path | None:
    """Return the folder of a built-in model, as ``from_pretrained`` takes it; None if ``name`` is not one."""
    return _ASSETS / BUILTIN_MODELS[name] if name in BUILTIN_MODELS else None
