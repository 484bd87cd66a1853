"""The states of a sync, the order they come in under each commit policy, and how a sync may end."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Commit = Literal["inplace", "staged"]


class State(StrEnum):
    """What a sync is doing."""

    ANNOUNCE = "announce"
    INTERRUPT = "interrupt"
    RELEASE_KV = "release_kv"
    PREPARE = "prepare"
    CONNECT = "connect"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    FINALIZE = "finalize"
    RESTORE_KV = "restore_kv"
    RESUME = "resume"


# In place, the live weights are written, so requests stop first. Staged, a shadow is, and requests run until it is
# known to be whole: they stand still for the swap alone.
ORDER: dict[Commit, tuple[State, ...]] = {
    "inplace": (
        State.ANNOUNCE,
        State.INTERRUPT,
        State.RELEASE_KV,
        State.PREPARE,
        State.CONNECT,
        State.TRANSFER,
        State.VERIFY,
        State.COMMIT,
        State.FINALIZE,
        State.RESTORE_KV,
        State.RESUME,
    ),
    "staged": (
        State.ANNOUNCE,
        State.PREPARE,
        State.CONNECT,
        State.TRANSFER,
        State.VERIFY,
        State.INTERRUPT,
        State.RELEASE_KV,
        State.COMMIT,
        State.FINALIZE,
        State.RESTORE_KV,
        State.RESUME,
    ),
}


def may_follow(order: Commit, last: State | None, state: State) -> bool:
    """Whether a sync may come to ``state`` after ``last`` (None: it begins). A further attempt at a transfer goes back
    to ``prepare``; nothing else goes back."""
    states = ORDER[order]
    return last is None or state is State.PREPARE or states.index(state) > states.index(last)


class Ending(StrEnum):
    """How a sync ended.

    committed: every replica serves the new version.
    kept: every replica serves the version it had; none was touched.
    fenced: the replicas named are out of routing, the others serve the new version.
    """

    COMMITTED = "committed"
    KEPT = "kept"
    FENCED = "fenced"
