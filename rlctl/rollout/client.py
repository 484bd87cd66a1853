"""A replica as those see it who send it requests, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError
from rlctl.sync.protocols import ServedReplica

if TYPE_CHECKING:
    from rlctl.sync.worker_process import Loader

__all__ = ["OnLost", "OnOutputs", "ReplicaClient", "ReplicaLostError"]

OnOutputs = Callable[[str, list[Output]], None]
OnLost = Callable[[str, str], None]


class ReplicaClient(ServedReplica, Protocol):
    """One replica. Its calls may come from any thread; after its death they raise ReplicaLostError, at once."""

    @property
    def serving(self) -> int | None:
        """The version that it serves, None while a sync has stopped it, or it is fenced, asleep or lost."""

    @property
    def loaders(self) -> Sequence[Loader]:
        """What takes its weights; for ``WorkerProcesses.join``. The same before and after a restart."""

    @property
    def lost(self) -> str:
        """Why it is gone, in words; empty while it lives."""

    def listen(self, outputs: OnOutputs, lost: OnLost) -> None:
        """Say who is told what happens, from a thread of the client's own, which they should not hold up.

        Args:
            outputs: called with the replica's name and what ended: finished, or aborted by a sync or by ``abort``. In
                lockstep that comes from ``tick`` instead.
            lost: called with the replica's name and the reason, once for each death; ``unfinished`` says what was
                under way, and no output of it comes any more.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests over; they are taken, and wait, also while a sync has stopped the replica.

        Raises:
            UsageError: one cannot be served; none was taken.
            ReplicaLostError: it is gone; none was taken. When it dies later, ``unfinished`` has them.
        """

    def unfinished(self) -> list[Request]:
        """Return the requests that were taken and have not ended, each with the prefix last known: any other replica
        can go on with them. After a death they stay here until a restart."""

    def abort(self, keys: Iterable[RequestKey] | None = None, *, deadline: Deadline) -> None:
        """End the named requests (None: all), keeping the tokens made so far; what ended comes as outputs. Unknown
        keys are ignored."""

    def tick(self, deadline: Deadline) -> list[Output]:
        """In lockstep only: decode one token for every running request, and return what has ended since the last."""

    def sleep(self, level: int, deadline: Deadline) -> None:
        """Stop serving and free memory: see RolloutEngine. Requests under way are kept, and wait."""

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Allocate again what ``tags`` names. It serves again after ``resume``: a sync's, or, where the weights stayed,
        one with the version that it had."""

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """Read back: name -> [dtype, shape, digest] of what it computes with; see RolloutEngine."""

    def close(self) -> None:
        """End it. Harmless when repeated; who listens is not told of it."""
