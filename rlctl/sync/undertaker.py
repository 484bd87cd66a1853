"""Removing what a process would leave if it were killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

# Its input ends with the process that made it, which alone holds the other end.
_SCRIPT = 'read -r _; rm -rf -- "$1"'


class Undertaker:
    """A small process that removes ``path`` once this process has gone, by SIGKILL too.

    It is in a session of its own: what is sent to the whole of this process's group does not reach it. Where all
    processes of a user are killed together, ``shared_memory.remove_leftovers`` finds what is left.
    """

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "rlctl-undertaker", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def close(self) -> None:
        """Have it remove the path now, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
