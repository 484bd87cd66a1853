"""The secret by which the two hosts of a sync bench know each other: from a variable or a private file, never shown."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from rlctl.errors import UsageError

VARIABLE = "RLCTL_BENCH_TOKEN"
LEAST = 16
_OPTION = "--token-file"


def read_token(file: Path | None) -> bytes | None:
    """Return the token in ``file``, else the one in the variable, else None.

    Raises UsageError when it is too short to be a secret, or others may read the file.
    """
    if file is None:
        token = os.environ.get(VARIABLE, "").strip()
        return _checked(token, VARIABLE) if token else None
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise UsageError(f"{file} cannot be read: {reason}", where=_OPTION) from error
    if mode & 0o077:
        raise UsageError(f"others may read {file} (mode {mode:o})", where=_OPTION, fix=f"chmod 600 {file}")
    return _checked(text, _OPTION)


def write_token() -> Path:
    """Write a new token into a file that only this user can read, and return where."""
    handle, name = tempfile.mkstemp(prefix="rlctl-sync-bench-token-")  # mode 0600
    with os.fdopen(handle, "w", encoding="ascii") as out:
        out.write(f"{secrets.token_urlsafe(32)}\n")
    return Path(name)


def derived(token: bytes, nonce: str) -> str:
    """Return the token of one bench's own connections: both sides derive it, so that it is never sent."""
    return hmac.digest(token, f"rlctl sync-bench {nonce}".encode(), "sha256").hex()


def _checked(token: str, where: str) -> bytes:
    if len(token) < LEAST:
        raise UsageError(
            f"a token of {len(token)} characters is no secret",
            where=where,
            fix=f"at least {LEAST}: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token.encode()
