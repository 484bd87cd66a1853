"""Where ``rlctl topology`` takes a node from: this machine, or a saved dump."""

from __future__ import annotations

import sys
from pathlib import Path

from rlctl.errors import UnavailableError, UsageError
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.survey import Survey, survey
from rlctl.hardware.topo_dump import parse_topo


def here() -> Survey:
    """Return what this machine has."""
    return survey()


def read_dump(source: str) -> NodeGraph:
    """Return the node of a dump: a file, or ``-`` for stdin.

    Raises:
        UsageError: it cannot be read, or is no dump.
    """
    if source == "-":
        return parse_topo(sys.stdin.buffer.read().decode("utf-8", "replace"), "stdin")
    path = Path(source)
    if not path.is_file():
        raise UsageError("no such file", where=source, fix="save one with: nvidia-smi topo -m > topo.txt")
    return parse_topo(path.read_bytes().decode("utf-8", "replace"), source)


def require_devices(found: Survey) -> None:
    """Raise UnavailableError when the machine shows no device to train on."""
    if found.graph.gpus or found.machine.devices:
        return
    raise UnavailableError(
        f"no GPU or NPU here: {'; '.join(found.graph.notes) or 'the driver shows none'}",
        where="--require-gpus",
        fix="run it on a node that has some, or read a dump of one with --from",
    )
