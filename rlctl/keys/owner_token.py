"""A file-name token that tells which process made a file, so that leftovers of dead processes can be recognised."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

_TOKEN = re.compile(r"(?P<host>[A-Za-z0-9_-]+)\.(?P<space>\d+)\.(?P<pid>\d+)\.(?P<ticks>\d+)\.[0-9a-f]{8}")


def new_token() -> str:
    """Return ``host.namespace.pid.start.random`` of this process, safe in a file name."""
    return f"{_host()}.{_pid_namespace()}.{os.getpid()}.{_start_ticks(os.getpid()) or 0}.{secrets.token_hex(4)}"


def owner_is_dead(token: str) -> bool:
    """Whether the process that made ``token`` is surely gone.

    False for a token of another host or process namespace, of which this process can know nothing, and for text that
    is no token.
    """
    match = _TOKEN.fullmatch(token)
    if match is None or match["host"] != _host() or int(match["space"]) != _pid_namespace():
        return False
    return _start_ticks(int(match["pid"])) != int(match["ticks"])


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "host"


def _pid_namespace() -> int:
    link = Path("/proc/self/ns/pid")
    return int(re.sub(r"\D", "", str(link.readlink()))) if link.is_symlink() else 0


def _start_ticks(pid: int) -> int | None:
    """Return when process ``pid`` started (clock ticks since boot), or None when there is none.

    The start time tells a process from a later one that got the same number.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(status.rpartition(")")[2].split()[19])  # field 22 of proc(5); the name before it may hold spaces
