"""A replica in this process, with a thread of its own that decodes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import OnLost, OnOutputs
from rlctl.rollout.decode_thread import DecodeThread
from rlctl.rollout.served import Served
from rlctl.rollout.under_way import Made, UnderWay
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import ReplicaLostError
from rlctl.sync.protocols import Interruption
from rlctl.sync.worker_process import Loader


class LocalReplica:
    """A ``ReplicaClient``. An error in decoding is its death; there is no restart.

    Args:
        served: it alone decodes with it, and closes it.
        max_length: most tokens of prompt and response together.
        lockstep: it decodes when it is told to, by ``tick``.
        progress_ticks: see ReplicaSetup.
    """

    def __init__(self, served: Served, *, max_length: int, lockstep: bool = False, progress_ticks: int = 32) -> None:
        self.lost = ""
        self.loaders: Sequence[Loader] = served.loaders
        self._served = served
        self._max_length = max_length
        self._lockstep = lockstep
        self._lock = threading.Lock()
        self._under_way = UnderWay()
        self._listener: tuple[OnOutputs, OnLost] | None = None
        self._ended: list[Output] = []  # nobody has been given them
        self._closed = False
        self._decode = DecodeThread(
            served,
            ended=self._on_ended,
            made=self._on_made,
            failed=self._on_failed,
            lockstep=lockstep,
            progress_ticks=progress_ticks,
        )
        self._decode.start()

    @property
    def replica(self) -> str:
        """Its name."""
        return self._served.replica

    @property
    def serving(self) -> int | None:
        """See ReplicaClient."""
        return None if self.lost else self._served.serving

    def close(self) -> None:
        """See ReplicaClient."""
        if not self._closed:
            with self._lock:
                self._closed, self.lost = True, self.lost or "it was closed"
            self._decode.stop()
            self._served.close()

    def listen(self, outputs: OnOutputs, lost: OnLost) -> None:
        """See ReplicaClient."""
        with self._lock:
            self._listener, reason = (outputs, lost), self.lost
            ended: list[Output] = []
            if not self._lockstep:
                ended, self._ended = self._ended, []
        if ended:
            outputs(self.replica, ended)
        if reason:
            lost(self.replica, reason)

    def submit(self, requests: Sequence[Request]) -> None:
        """See ReplicaClient."""
        with self._lock:
            self._require_alive()
            self._under_way.add(requests, max_length=self._max_length)
            self._served.submit(requests)

    def unfinished(self) -> list[Request]:
        """See ReplicaClient."""
        with self._lock:
            return self._under_way.requests()

    def abort(self, keys: Iterable[RequestKey] | None = None, *, deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._living().abort(None if keys is None else list(keys), deadline)

    def tick(self, deadline: Deadline) -> list[Output]:
        """See ReplicaClient."""
        self._living()
        try:
            self._decode.tick().result(deadline.remaining)
        except TimeoutError as error:
            raise deadline.error(f"a decode step of replica {self.replica}") from error
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See ReplicaClient."""
        return self._living().digests(names, deadline)

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._living().sleep(level, deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._living().wake(tags, deadline)

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._living().interrupt(how, version, deadline)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._living().release_kv(deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._living().restore_kv(deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._living().resume(version, deadline)

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self._served.fence(reason)

    def _living(self) -> Served:
        self._require_alive()
        return self._served

    def _require_alive(self) -> None:
        if self.lost:
            raise ReplicaLostError(f"replica {self.replica} is lost: {self.lost}")

    def _on_ended(self, outputs: list[Output]) -> None:
        with self._lock:
            self._under_way.ended(outputs)
            listener = None if self._lockstep else self._listener
            if listener is None:
                self._ended += outputs
        if listener is not None:
            listener[0](self.replica, outputs)

    def _on_made(self, news: list[Made]) -> None:
        with self._lock:
            self._under_way.made(news)

    def _on_failed(self, error: Exception) -> None:
        with self._lock:
            self.lost, listener = ErrorData.of(error).sentence, self._listener
        if listener is not None:
            listener[1](self.replica, self.lost)
