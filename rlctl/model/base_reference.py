"""What model an adapter belongs to: a name to find it by, and a digest to know it by."""

from __future__ import annotations

import json
from pathlib import Path

from rlctl.keys.json_file import read_object

FILE = "base_model.json"


def write_base(folder: Path, model: str, digest: str) -> None:
    """Write into an adapter's folder the model's folder or hub name, and the SHA-256 of its float32 parameters."""
    (folder / FILE).write_text(json.dumps({"model": model, "digest": digest}, indent=2) + "\n", encoding="utf-8")


def read_base(folder: Path) -> tuple[str, str] | None:
    """Return model and digest, or None for an adapter that says neither. Raises JsonError for a damaged file."""
    if not (folder / FILE).is_file():
        return None
    document = read_object(folder / FILE, limit=1 << 16)
    return str(document.get("model")), str(document.get("digest"))
