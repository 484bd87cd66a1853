"""What serves requests under weight syncs in one process: interrupted, loaded through an inlet, and fenced."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

import torch

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request, RolloutEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.protocols import Interruption, LoadReport, Replica, ServedReplica
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype
from rlctl.sync.worker_process import Loader


class Served(ServedReplica, Protocol):
    """What a replica's process hosts. One thread calls ``step`` again and again; all else comes from others."""

    @property
    def serving(self) -> int | None:
        """The version that it serves, None while a sync has stopped it or it is fenced."""

    @property
    def loaders(self) -> Sequence[Loader]:
        """What takes the weights, by rank."""

    @property
    def num_running(self) -> int:
        """Requests taken whose output has not been returned. Does not wait for a step."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; does not wait for a step. Those that cannot be served are an error of a later ``step``."""

    def step(self, timeout: float = 0.0) -> list[Output]:
        """Decode; return what ended, by an abort too. Waits up to ``timeout`` seconds while there is nothing to do."""

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """Return what has been made of each running request, its prefix included; called by who calls ``step``."""

    def abort(self, keys: Iterable[RequestKey] | None, deadline: Deadline) -> None:
        """End the named requests (None: all), keeping the tokens made so far: later steps return their outputs."""

    def sleep(self, level: int, deadline: Deadline) -> None:
        """Stop serving until ``resume``, and free memory: see RolloutEngine."""

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Allocate again what ``tags`` names; ``resume`` serves again."""

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """Read back: name -> [dtype, shape, digest] of what it computes with; see RolloutEngine."""

    def close(self) -> None:
        """Free everything."""


class ServedEngine:
    """A rollout engine of this process as ``Served``, and the one ``Loader`` of it
    (``WorkerProcesses.join(served.replica, [served])``).

    While a sync has stopped the engine, or has fenced it, ``step`` decodes nothing; requests are taken, and wait. Who
    calls something else waits for the decode step under way and for no second one.

    Args:
        engine: with or without weights.
        token: the run's.
        lockstep: nobody calls ``step`` during a sync, so one that waits for requests to end decodes them itself.
        adapters: the engine as what takes adapters alone; None: streams bring its weights.
    """

    def __init__(
        self, engine: RolloutEngine, token: str, *, lockstep: bool = False, adapters: Replica | None = None
    ) -> None:
        self.engine = engine
        self._adapters = adapters
        self._lockstep = lockstep
        self.serving: int | None = None
        self._inlet = WeightInlet(token)
        self._using = threading.Lock()  # the engine
        self._changed = threading.Condition()  # of what follows; nobody computes while holding it
        self._stopped = True  # until a sync has brought weights
        self._draining = False
        self._callers = 0  # who wait for the engine, or use it, and are no step
        self._ended: list[Output] = []
        self._taken: list[Request] = []
        self._targets: dict[str, TensorMeta] = {}

    @property
    def replica(self) -> str:
        """The engine's name."""
        return self.engine.replica

    @property
    def loaders(self) -> Sequence[Loader]:
        """See Served."""
        return [self]

    @property
    def num_running(self) -> int:
        """See Served."""
        with self._changed:
            return len(self._taken) + len(self._ended) + self.engine.num_running

    def submit(self, requests: Sequence[Request]) -> None:
        """See Served. What comes while a sync waits for others to end waits for the next version."""
        with self._changed:
            self._taken += requests
            self._changed.notify_all()

    def step(self, timeout: float = 0.0) -> list[Output]:
        """Decode one token for every running request, unless a sync has stopped that; return those that ended, by a
        sync's abort too. ``timeout``: seconds to wait while there is nothing to do."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended) or not self._callers)
            self._changed.wait_for(lambda: bool(self._ended) or self._may_decode(), timeout)
            ended, self._ended = self._ended, []
            if not self._may_decode():
                return ended
        with self._using:
            with self._changed:  # a sync may have come in between
                taken = self._take() if self._may_decode() else None
            if taken is not None:
                self.engine.submit(taken)
                ended += self.engine.step()
        if not self.engine.num_running:
            with self._changed:
                self._changed.notify_all()
        return ended

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """See Served."""
        with self._using:
            return self.engine.progress()

    def abort(self, keys: Iterable[RequestKey] | None = None, deadline: Deadline | None = None) -> None:
        """See Served."""
        named = None if keys is None else list(keys)
        with self._engine(deadline):
            self._submit_taken()
            self._end(self.engine.abort(named))

    # --- ServedReplica ---

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica. ``wait`` needs somebody who goes on calling ``step``, but in lockstep."""
        self.serving = None
        if how == "wait" and not self._lockstep:
            self._drain(deadline)
        with self._engine(deadline):
            if how == "wait" and self._lockstep:
                self._decode_all(deadline)
            self._stopped = True
            if how == "abort":
                self._end(self.engine.abort())

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._engine(deadline):
            self.engine.sleep(1)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._engine(deadline):
            self.engine.wake(("kv_cache",))

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Raises RlctlError when the engine holds another version."""
        with self._engine(deadline):
            if self.engine.version != version:
                raise RlctlError(f"the engine holds version {self.engine.version}, and {version} is to be served")
            self.serving, self._stopped = version, False

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self.serving, self._stopped = None, True

    # --- Loader ---

    def targets(self) -> Mapping[str, TensorMeta]:
        """See Loader. Asked of the engine once."""
        if not self._targets:
            self._targets = dict(self.engine.weights())
        return self._targets

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """See Loader."""
        stream = self._inlet.stream(order, deadline)
        if self._adapters is not None:  # bases come in float32, whatever the engine computes in
            with self._engine(deadline):
                return self._adapters.load_weights(stream, order.version)
        if not order.cast:
            stream = _same_dtypes(stream, self.targets())
        with self._engine(deadline):
            return self.engine.load_weights(stream, order.version)

    # --- life ---

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See Served."""
        with self._engine(deadline):
            self.serving, self._stopped = None, True
            self.engine.sleep(level)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See Served."""
        with self._engine(deadline):
            self.engine.wake(tags)

    def digests(self, names: Iterable[str] | None = None, deadline: Deadline | None = None) -> dict[str, list[Any]]:
        """Read back: see RolloutEngine."""
        with self._engine(deadline):
            if self._adapters is not None:
                return {name: list(found) for name, found in self._adapters.digests(names).items()}
            return self.engine.digests(names)

    def close(self) -> None:
        """Let go what syncs have mapped, and free the engine."""
        self._inlet.close()
        with self._engine():
            self.engine.close()

    def _may_decode(self) -> bool:
        if self._stopped or self._callers:
            return False
        return bool(self.engine.num_running or (self._taken and not self._draining))

    def _take(self) -> list[Request]:
        if self._draining:
            return []
        taken, self._taken = self._taken, []
        return taken

    def _submit_taken(self) -> None:
        with self._changed:
            taken, self._taken = self._taken, []
        self.engine.submit(taken)

    def _end(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self._ended += outputs

    def _drain(self, deadline: Deadline) -> None:
        """Wait until nothing runs; what is submitted meanwhile waits."""
        with self._changed:
            if self._stopped:
                return
            self._draining = True
            try:
                if not self._changed.wait_for(lambda: not self.engine.num_running, deadline.remaining):
                    raise deadline.error(f"waiting for {self.engine.num_running} requests to end")
                self._stopped = True
            finally:
                self._draining = False

    def _decode_all(self, deadline: Deadline) -> None:
        while self.engine.num_running and not self._stopped:
            deadline.check(f"decoding {self.engine.num_running} requests to their end")
            self._end(self.engine.step())

    @contextmanager
    def _engine(self, deadline: Deadline | None = None) -> Iterator[None]:
        """Have the engine to oneself, after the step under way: no other begins while somebody waits here."""
        with self._changed:
            self._callers += 1
        try:
            limit = inf if deadline is None else deadline.remaining
            if not self._using.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
                assert deadline is not None
                raise deadline.error(f"waiting for the engine of replica {self.replica}")
            try:
                yield
            finally:
                self._using.release()
        finally:
            with self._changed:
                self._callers -= 1
                self._changed.notify_all()


def _same_dtypes(
    stream: Iterator[tuple[str, torch.Tensor]], targets: Mapping[str, TensorMeta]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stream:
        if name in targets:
            require_same_dtype(TensorMeta.of(name, tensor), targets[name].dtype)
        yield name, tensor
