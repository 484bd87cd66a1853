"""Two processes prove to each other that they know the run's token, without sending it."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError

if TYPE_CHECKING:
    from rlctl.sync.channel import Channel

HANDSHAKE_SECONDS = 5.0
_NONCE = 32


def prove(channel: Channel, token: bytes, mine: bytes, theirs: bytes, deadline: Deadline) -> None:
    """Prove to know the token and have it proved; the roles keep a proof from being played back."""
    nonce = secrets.token_bytes(_NONCE)
    channel.send(nonce, deadline)
    other = channel.receive(deadline, limit=_NONCE)
    channel.send(hmac.digest(token, mine + other, "sha256"), deadline)
    proof = channel.receive(deadline, limit=_NONCE)
    if not hmac.compare_digest(proof, hmac.digest(token, theirs + nonce, "sha256")):
        raise CorruptedError(f"{channel.peer} does not know the token")
