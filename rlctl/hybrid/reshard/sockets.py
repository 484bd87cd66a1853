"""Send buffers of connections within this host, small enough to stay in a processor's cache.

Between two processes of one host every byte is copied into the sender's buffer and out of it again. Left alone, Linux
lets these buffers grow to megabytes each, and what is sent has left the cache before the reader comes.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

# The kernel counts its own part, too, and takes twice as much.
SEND_NBYTES = 256 << 10
_OPEN = Path("/proc/self/fd")


def bound_send_buffers(nbytes: int = SEND_NBYTES) -> int:
    """Bound the send buffers of this process's TCP connections to processes of this host. Return how many these are.

    A process group makes its connections when it is made, and gives them to nobody, so that they are found among all
    that this process has open. Others that stay within the host are bounded, too, which does them no harm: between
    its two ends no more is ever under way than fits.
    """
    # Python would give a default timeout to each connection that it looks at.
    if not _OPEN.is_dir() or socket.getdefaulttimeout() is not None:
        return 0
    return sum(_bound(int(entry.name), nbytes) for entry in _OPEN.iterdir())


def _bound(descriptor: int, nbytes: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile: by another thread, or it was the folder's own
        return False
    with socket.socket(fileno=copy) as found:
        if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            within: bool = found.getsockname()[0] == found.getpeername()[0]
        except OSError:  # it listens, or the other end is gone
            return False
        if within:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        return within
