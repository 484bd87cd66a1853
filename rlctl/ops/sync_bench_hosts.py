"""A sync bench between two hosts: how they find each other, and how it ends."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import UsageError
from rlctl.ops.sync_bench_link import Address, accept, end, greet, listen, reach
from rlctl.ops.sync_bench_token import VARIABLE, derived, read_token, write_token
from rlctl.sync.undertaker import Undertaker

if TYPE_CHECKING:
    from rlctl.ops.sync_bench_remote import OtherHost

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
Say = Callable[[str], None]


@contextmanager
def other_host(address: Address, token_file: Path | None, wait: float, say: Say) -> Iterator[OtherHost]:
    """Wait for the host that will run the rollout workers.

    Args:
        address: where to listen; port 0 takes a free one.
        token_file: see ``read_token``; without any token one is made, and removed at the end.
        wait: seconds that the other host may take to come.
        say: told how to start it, and who was refused.
    """
    from rlctl.ops.sync_bench_remote import OtherHost  # torch: only once it is needed

    token, made, undertaker = read_token(token_file), None, None
    if token is None:
        made = write_token()
        undertaker = Undertaker(made)
        token = read_token(made)
        assert token is not None
    try:
        listener = listen(address, token)
        port = int(listener.address.rpartition(":")[2])
        how = f"--token-file {made or token_file}" if made or token_file else f"with the same {VARIABLE}"
        if made:
            say(f"a token was made: copy {made} to the other host, readable for you alone")
        # Bound to all interfaces, it is reached by the host's name.
        host = socket.gethostname() if address.host in _EVERYWHERE else address.host
        say(f"listening; on the other host: rlctl sync-bench --connect {Address(host, port)} {how}")
        try:
            channel = accept(listener, wait, lambda: say("refused one that does not know the token"))
        finally:
            listener.close()
        try:
            nonce = greet(channel, secrets.token_hex(16))
        except BaseException:
            end(channel)
            raise
        other = OtherHost(channel, derived(token, nonce))
        try:
            yield other
        except BaseException:
            other.close(done=False)
            raise
        other.close(done=True)
    finally:
        if undertaker:
            undertaker.close()


def serve_rollouts(address: Address, token_file: Path | None, wait: float, say: Say) -> dict[str, Any]:
    """Run the rollout workers for the bench that listens at ``address``; return what was done, as plain data."""
    token = read_token(token_file)
    if token is None:
        raise UsageError(
            "the listening side's token is needed", where="--connect", fix=f"--token-file FILE, or set {VARIABLE}"
        )
    channel = reach(address, token, wait)
    try:
        nonce = greet(channel)
        say(f"connected to {address}; it decides what is measured")
        from rlctl.ops.sync_bench_serve import RolloutHost  # torch: only once it is needed

        host = RolloutHost(channel, derived(token, nonce))
        host.serve(lambda backend: say(f"rollout workers for {backend}"))
    finally:
        end(channel)
    return {"address": str(address), "backends": host.backends, "receipts": host.receipts}
