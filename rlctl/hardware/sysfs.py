"""Reading single values of /sys, which may be absent, unreadable or malformed on any machine."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the text of a file without its last newline; None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None  # drivers answer some files with an error, such as the speed of a card that is down


def read_int(path: Path) -> int | None:
    """Return the whole number in a file; None when there is none."""
    text = read_text(path)
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else None


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing when it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
