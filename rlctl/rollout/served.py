"""A rollout engine of this process as weight syncs see it: it is interrupted, loaded through an inlet, and fenced."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from rlctl.errors import RlctlError
from rlctl.rollout.base import Output, Request, RolloutEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.inlet import LoadOrder, WeightInlet
from rlctl.sync.protocols import Interruption, LoadReport
from rlctl.sync.tensor_meta import TensorMeta, require_same_dtype


class ServedEngine:
    """A ``ServedReplica`` and a ``Loader`` (``WorkerProcesses.join(served.replica, [served])``).

    Whoever decodes calls ``submit`` and ``step`` here, in a thread of its own; syncs come from others. While a sync
    has stopped the engine, or has fenced it, ``step`` decodes nothing; requests are taken, and wait.

    Args:
        engine: with or without weights.
        token: the run's.
    """

    def __init__(self, engine: RolloutEngine, token: str) -> None:
        self.engine = engine
        self.serving: int | None = None
        self._inlet = WeightInlet(token)
        self._changed = threading.Condition()
        self._stopped = True  # until a sync has brought weights
        self._draining = False
        self._aborted: list[Output] = []
        self._held: list[Request] = []  # came while others were waited for
        self._targets: dict[str, TensorMeta] = {}

    @property
    def replica(self) -> str:
        """The engine's name."""
        return self.engine.replica

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine; what comes while a sync waits for others to end is checked by a later ``step``."""
        with self._changed:
            if self._draining:
                self._held += requests
            else:
                self.engine.submit(requests)

    def step(self, timeout: float = 0.0) -> list[Output]:
        """Decode one token for every running request; return those that ended, by a sync's abort too.

        ``timeout``: seconds to wait while a sync is under way; nothing is returned when it still is.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._stopped or bool(self._aborted), timeout)
            if self._held and not self._draining:
                held, self._held = self._held, []
                self.engine.submit(held)
            ended, self._aborted = self._aborted, []
            if not self._stopped and self.engine.num_running:
                ended += self.engine.step()
            if not self.engine.num_running:
                self._changed.notify_all()
            return ended

    # --- ServedReplica ---

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica. ``wait`` needs somebody who goes on calling ``step``."""
        with self._changed:
            self.serving = None
            if how == "abort":
                self._aborted += self.engine.abort()
            elif how == "wait" and not self._stopped:
                self._draining = True
                ended = self._changed.wait_for(lambda: not self.engine.num_running, deadline.remaining)
                self._draining = False
                if not ended:
                    raise deadline.error(f"waiting for {self.engine.num_running} requests to end")
            self._stopped = True
            self._changed.notify_all()

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._changed:
            self.engine.sleep(1)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        with self._changed:
            self.engine.wake(("kv_cache",))

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Raises RlctlError when the engine holds another version."""
        with self._changed:
            if self.engine.version != version:
                raise RlctlError(f"the engine holds version {self.engine.version}, and {version} is to be served")
            self.serving, self._stopped = version, False
            self._changed.notify_all()

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
        if not order.cast:
            stream = _same_dtypes(stream, self.targets())
        with self._changed:
            return self.engine.load_weights(stream, order.version)

    def digests(self, names: Iterable[str] | None = None) -> dict[str, list[object]]:
        """Read back: see RolloutEngine."""
        with self._changed:
            return self.engine.digests(names)

    def close(self) -> None:
        """Let go what syncs have mapped; the engine stays."""
        self._inlet.close()


def _same_dtypes(
    stream: Iterator[tuple[str, torch.Tensor]], targets: Mapping[str, TensorMeta]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stream:
        if name in targets:
            require_same_dtype(TensorMeta.of(name, tensor), targets[name].dtype)
        yield name, tensor
