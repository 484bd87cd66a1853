"""Where a run's checkpoints lie, told without importing torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"^step_(\d+)$")


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a complete checkpoint."""
    return _NAME.match(name) is not None


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps that have a complete checkpoint in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := _NAME.match(p.name)))
