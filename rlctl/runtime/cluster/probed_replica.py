"""A replica that serves a new version only after it has been compared with the trainer's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import OnLost, OnOutputs, ReplicaClient, ReplicaLostError
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from rlctl.sync.protocols import Interruption
from rlctl.sync.worker_process import Loader

# Ordinals of training count up from 0, those of an evaluation down from -1.
PROBES = -(1 << 40)


class Probed(Protocol):
    """A replica that can be asked what it computes with."""

    @property
    def replica(self) -> str:
        """Its name."""

    def probe(self, requests: Sequence[Request], deadline: Deadline) -> list[Output]:
        """Return the outputs of requests with ordinals from ``PROBES`` down, in their order."""

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See ReplicaClient."""


class Agreement(Protocol):
    """What tells whether a replica and the trainer have the same weights."""

    def check(self, replica: Probed, version: int, deadline: Deadline) -> None:
        """Raise RlctlError when they have not."""


class ProbedReplica:
    """A ``ReplicaClient`` around another: ``resume`` serves, probes, and raises when the probe does not agree, so that
    the sync fences it. Nothing that was made under weights that did not agree reaches anybody: those tokens are cut
    off, and the request ends as aborted.

    Args:
        client: the replica.
        agreement: how it is compared.
        lockstep: as the client is.
        before_kv: called before the KV cache comes back.
        on_lost: told of the client's death, after who listens.
    """

    def __init__(
        self,
        client: ReplicaClient,
        agreement: Agreement,
        *,
        lockstep: bool = False,
        before_kv: Callable[[], None] = lambda: None,
        on_lost: OnLost = lambda _name, _reason: None,
    ) -> None:
        self._client = client
        self._agreement = agreement
        self._lockstep = lockstep
        self._before_kv = before_kv
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._probing = False
        self._stuck = ""
        self._probes: dict[RequestKey, Output] = {}
        self._held: list[Output] = []
        self._bad: set[int] = set()  # versions that it served without holding them
        self._outputs: OnOutputs = lambda _name, _outputs: None
        self._lost: OnLost = lambda _name, _reason: None
        client.listen(self._came, self._gone)  # probes may come before there is anybody else

    @property
    def replica(self) -> str:
        """Its name."""
        return self._client.replica

    @property
    def serving(self) -> int | None:
        """See ReplicaClient; None while it is compared."""
        return None if self._probing else self._client.serving

    @property
    def loaders(self) -> Sequence[Loader]:
        """See ReplicaClient."""
        return self._client.loaders

    @property
    def lost(self) -> str:
        """See ReplicaClient."""
        return self._client.lost

    def listen(self, outputs: OnOutputs, lost: OnLost) -> None:
        """See ReplicaClient."""
        self._outputs, self._lost = outputs, lost
        if reason := self.lost:
            lost(self.replica, reason)

    def submit(self, requests: Sequence[Request]) -> None:
        """See ReplicaClient."""
        self._client.submit(requests)

    def unfinished(self) -> list[Request]:
        """See ReplicaClient."""
        found = [request for request in self._client.unfinished() if request.key.ordinal > PROBES]
        return [replace(request, prefix=tuple(self._trusted(request.prefix))) for request in found]

    def abort(self, keys: Iterable[RequestKey] | None = None, *, deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._client.abort(keys, deadline=deadline)

    def tick(self, deadline: Deadline) -> list[Output]:
        """See ReplicaClient."""
        held, self._held = self._held, []
        return [*held, *self._sort(self._client.tick(deadline))]

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See ReplicaClient."""
        with self._timed():
            self._client.sleep(level, deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See ReplicaClient."""
        with self._timed():
            self._client.wake(tags, deadline)

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See ReplicaClient."""
        return self._client.digests(names, deadline)

    def close(self) -> None:
        """See ReplicaClient."""
        self._client.close()

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._timed():
            self._client.interrupt(how, version, deadline)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._timed():
            self._client.release_kv(deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._before_kv()
        with self._timed():
            self._client.restore_kv(deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Raises RlctlError when what it computes with is not what the trainer has."""
        self._probing = True
        try:
            with self._timed():
                self._client.resume(version, deadline)
                self._agreement.check(self, version, deadline)
            self._bad.discard(version)
        except BaseException:
            self._bad.add(version)
            raise
        finally:
            self._probing = False
            self._pass_on()

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self._client.fence(reason)

    def probe(self, requests: Sequence[Request], deadline: Deadline) -> list[Output]:
        """See Probed."""
        self._probes = {}
        self._client.submit(requests)
        what = f"{self.replica}: {len(requests)} probes"
        while self._lockstep and len(self._probes) < len(requests):
            deadline.check(what)
            self._held += self._sort(self._client.tick(deadline))
        with self._changed:
            ended = self._changed.wait_for(
                lambda: len(self._probes) == len(requests) or bool(self.lost), deadline.remaining
            )
            if self.lost:
                raise ReplicaLostError(f"{what}: {self.lost}")
            if not ended:
                raise deadline.error(what)
            return [self._probes[request.key] for request in requests]

    def take_stuck(self) -> str:
        """Return what did not end in time since the last call; empty when all did."""
        stuck, self._stuck = self._stuck, ""
        return stuck

    @contextmanager
    def _timed(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as error:
            self._stuck = error.message
            raise

    def _came(self, name: str, ended: list[Output]) -> None:
        if passed := self._sort(ended):
            self._outputs(name, passed)

    def _gone(self, name: str, reason: str) -> None:
        self._lost(name, reason)
        with self._changed:
            self._changed.notify_all()
        self._on_lost(name, reason)

    def _sort(self, ended: Sequence[Output]) -> list[Output]:
        """Keep outputs of probes, and all others while it is compared; return the rest."""
        with self._changed:
            self._probes |= {output.key: output for output in ended if output.key.ordinal <= PROBES}
            others = [output for output in ended if output.key.ordinal > PROBES]
            if self._probing and not self._lockstep:
                self._held += others
                others = []
            self._changed.notify_all()
        return [self._cut(output) for output in others]

    def _pass_on(self) -> None:
        """Hand over what was held back; in lockstep the next tick does."""
        held = [self._cut(output) for output in self._held]
        self._held = held if self._lockstep else []
        if held and not self._lockstep:
            self._outputs(self.replica, held)

    def _cut(self, output: Output) -> Output:
        trusted = self._trusted(output.segments)
        return output if len(trusted) == len(output.segments) else Output(output.key, trusted, "abort")

    def _trusted(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments before the first that was made under weights that did not agree."""
        for place, segment in enumerate(segments):
            if segment.version in self._bad and segment.replica == self.replica:
                return list(segments[:place])
        return list(segments)
