"""A vLLM engine as a replica of weight syncs, and its workers as what takes the weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.rollout.vllm.handles import EngineHandle
from rlctl.sync.deadline import Deadline
from rlctl.sync.inlet import LoadOrder
from rlctl.sync.protocols import Interruption, LoadReport
from rlctl.sync.tensor_meta import TensorMeta


class VllmReplica:
    """A ``ServedReplica``; ``loaders`` are what ``WorkerProcesses.join`` takes, one for each of vLLM's workers.

    Args:
        handle: the engine.
        replica: its name.
    """

    def __init__(self, handle: EngineHandle, replica: str) -> None:
        self._handle = handle
        self.replica = replica
        self.serving: int | None = None
        self._orders = _Together(handle)
        self.loaders = [WorkerLoader(handle, self._orders, place) for place in range(handle.workers())]

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Requests of a replica that does not serve, fenced or asleep, are not waited for: they
        would be computed with weights that are not known to be whole."""
        if how == "wait" and self.serving is None:
            how = "keep"
        self.serving = None
        self._handle.pause(how, deadline)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._handle.drop_cache(deadline)
        self._handle.call("rlctl_release_kv", (), deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._handle.call("rlctl_restore_kv", (), deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica. Raises RlctlError when the workers do not hold ``version``."""
        held = self._handle.call("rlctl_version", (), deadline)
        if held != [version] * len(held):
            raise RlctlError(f"vLLM's workers hold versions {held}, and version {version} is to be served")
        self._handle.drop_cache(deadline)
        self._handle.resume(version, deadline)
        self.serving = version

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self.serving = None
        self._handle.hold()

    def digests(self, names: Sequence[str] | None = None, *, timeout: float = 60.0) -> list[dict[str, list[Any]]]:
        """Return, for each worker, name -> [dtype, shape, 16-byte digest] of what it computes with.

        With one worker that is what ``sync.member.described`` says of the tensors that were sent.
        """
        return self._handle.call("rlctl_digests", (None if names is None else list(names),), Deadline(timeout))

    def read(self, name: str, *, timeout: float = 60.0) -> list[list[Any]]:
        """Return, for each worker, the regions of a tensor that it holds: [[[start, stop], ...], dtype, bytes]."""
        return self._handle.call("rlctl_read", (name,), Deadline(timeout))


class WorkerLoader:
    """One of vLLM's workers as a ``Loader``.

    Args:
        handle: the engine.
        orders: shared by its workers.
        place: of the worker among them.
    """

    def __init__(self, handle: EngineHandle, orders: _Together, place: int) -> None:
        self._handle = handle
        self._orders = orders
        self._place = place
        self._targets: dict[str, TensorMeta] = {}

    def targets(self) -> Mapping[str, TensorMeta]:
        """See Loader. Asked of the engine once: nothing else may wait for one that computes."""
        if not self._targets:
            metas, _ = self._handle.call("rlctl_targets", (), Deadline(60.0))[self._place]
            self._targets = {meta.name: meta for meta in msgspec.convert(metas, list[TensorMeta])}
        return self._targets

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """See Loader."""
        return msgspec.convert(self._orders.load(order, deadline)[self._place], LoadReport)


class _Together:
    """vLLM calls all its workers at once; each loader waits here until the others are there, too."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._arrived = 0
        self._answer: Future[list[Any]] = Future()

    def load(self, order: LoadOrder, deadline: Deadline) -> list[Any]:
        with self._lock:
            answer, self._arrived = self._answer, self._arrived + 1
            last = self._arrived == self._handle.workers()
            if last:
                self._answer, self._arrived = Future(), 0
        if last:
            arguments = (msgspec.msgpack.encode(order), deadline.remaining)
            try:
                answer.set_result(self._handle.call("rlctl_load", arguments, deadline))
            except BaseException as error:  # noqa: BLE001 - raised by all of them
                answer.set_exception(error)
        try:
            return answer.result(deadline.remaining + 0.5)
        except TimeoutError as error:
            raise deadline.error("loading into vLLM's workers") from error
