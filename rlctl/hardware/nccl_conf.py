"""Variables that NCCL takes from files: ``$NCCL_CONF_FILE`` or ``~/.nccl.conf``, then ``/etc/nccl.conf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlctl.hardware.sysfs import read_text


def conf_variables(env: Mapping[str, str], root: Path = Path("/")) -> dict[str, tuple[str, str]]:
    """Return name -> (value, file) of what the files set and the environment does not; the first file wins."""
    own = env.get("NCCL_CONF_FILE")
    home = env.get("HOME")
    files = [Path(own)] if own else [Path(home) / ".nccl.conf"] if home else []
    found: dict[str, tuple[str, str]] = {}
    for file in (*files, root / "etc/nccl.conf"):
        for line in (read_text(file) or "").split("\n"):
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#") and name.strip() not in env:
                found.setdefault(name.strip(), (value.strip(), str(file)))
    return found
