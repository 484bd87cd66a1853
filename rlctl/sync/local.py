"""One side of a sync in this process: a trainer's ranks, or inference engines that take weights without a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rlctl.errors import UsageError
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import TransferStats
from rlctl.sync.host import EngineHost
from rlctl.sync.protocols import ShardSource, WeightSource


class SourceHost(EngineHost):
    """A trainer rank: what it sends comes from its model.

    Args:
        source: the model's side.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._source = source

    def send(self, version: int, base_version: int | None = None) -> TransferStats:
        """Send the weights as they are now; where layouts are declared, out of this rank's shards."""
        layouts, source = self.engine.layouts, self._source
        if layouts is None:
            return self._send(source.per_tensor_params(), version, base_version)
        if not isinstance(source, ShardSource):
            raise UsageError(
                f"{type(source).__name__} has no local_params, and layouts are declared",
                fix="a trainer that names its shards, or no layouts: workers get whole tensors then",
            )
        shards = dict(source.local_params())
        return self._send(layouts.sources(self.engine.member.rank, shards), version, base_version)


class LocalMember:
    """One host in this process; see protocols.Seat. Its commands run one at a time.

    Args:
        name: what errors call it.
        host: opened already.
        replica: that a rollout member fills; empty for a trainer.
    """

    def __init__(self, name: str, host: EngineHost, replica: str = "") -> None:
        self.name = name
        self.host = host
        self.replica = replica
        self.holds_weights = bool(replica)
        self._lock = threading.Lock()

    def ask(self, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        """Run a command; return what it returns, as msgpack data."""
        if not self._lock.acquire(timeout=deadline.remaining):
            raise deadline.error(f"{self.name}: {command}: still busy with an earlier command")
        try:
            result = self.host.handle(command, arguments)
        finally:
            self._lock.release()
        return msgspec.to_builtins(result, builtin_types=(bytes,))


class LocalMembers:
    """A Group of members in this process.

    Args:
        members: by rank.
    """

    def __init__(self, members: Sequence[LocalMember]) -> None:
        self.members = list(members)

    def start(
        self, command: str, arguments: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, Future[Any]]:
        """See Group. A command that is stuck in a library cannot be ended; the manager stops waiting for it."""
        return {place: self._call(self.members[place], command, args, deadline) for place, args in arguments.items()}

    def cancel(self, places: Iterable[int]) -> None:
        """See Group."""
        for place in places:
            self.members[place].host.cancel()

    def _call(self, member: LocalMember, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Future[Any]:
        return call(lambda: member.ask(command, arguments, deadline), f"{command} {member.name}")
