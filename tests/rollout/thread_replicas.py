"""Replicas in threads of the tests' process, behind the interface of those in processes; they can be killed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import OnLost, OnOutputs, ReplicaLostError
from rlctl.rollout.embedded.admission import check_request
from rlctl.rollout.served import ServedEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.protocols import Interruption
from tests.rollout.tiny import VOCAB, make_engine


class ThreadReplica:
    """An embedded engine that a thread decodes with; in lockstep nobody but ``tick`` does.

    Args:
        serving: whether it serves version 0 from the start.
        forgets: most tokens of each response that nobody knows of when it is killed.
        pause: seconds between two steps.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        lockstep: bool = False,
        serving: bool = True,
        forgets: int = 3,
        pause: float = 0.0,
        **more: Any,
    ) -> None:
        self.replica = name
        self.lost = ""
        self.loaders: Sequence[Any] = ()
        self.served = ServedEngine(make_engine(model, replica=name, **more), "token")
        self.taken: list[Request] = []
        self._lockstep = lockstep
        self._pause = pause
        self._random = random.Random(name)
        self._forgets = forgets
        self._open: dict[RequestKey, Request] = {}
        self._lock = threading.RLock()
        self._outputs: OnOutputs = lambda *_: None
        self._lost: OnLost = lambda *_: None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._decode)
        if serving:
            self.served.resume(0, Deadline(5))
        if not lockstep:
            self._thread.start()

    @property
    def serving(self) -> int | None:
        return None if self.lost else self.served.serving

    def listen(self, outputs: OnOutputs, lost: OnLost) -> None:
        self._outputs, self._lost = outputs, lost

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._require_life()
            for request in requests:
                check_request(request, self._open.keys(), vocab_size=VOCAB, max_length=256)
            self.served.submit(requests)
            self.taken += requests
            self._open |= {request.key: request for request in requests}

    def unfinished(self) -> list[Request]:
        with self._lock:
            return list(self._open.values())

    def abort(self, keys: Iterable[RequestKey] | None = None, *, deadline: Deadline) -> None:
        with self._lock:
            self._require_life()
            self.served.abort(keys, deadline)

    def tick(self, deadline: Deadline) -> list[Output]:
        assert self._lockstep
        with self._lock:
            self._require_life()
            return self._closed(self.served.step())

    def sleep(self, level: int, deadline: Deadline) -> None:
        self.served.engine.sleep(level)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        self.served.engine.wake(tags)

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        return self.served.digests(names)

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        self.served.interrupt(how, version, deadline)

    def release_kv(self, deadline: Deadline) -> None:
        self.served.release_kv(deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        self.served.restore_kv(deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        self.served.resume(version, deadline)

    def fence(self, reason: str) -> None:
        self.served.fence(reason)

    def kill(self, reason: str = "SIGKILL") -> None:
        """Die, as a process does: what it had is known up to a few tokens before."""
        with self._lock:
            if self.lost:
                return
            self.served.abort(None, Deadline(5))
            for output in self.served.step():
                self._open[output.key] = self._known(self._open[output.key], output.segments)
            self.lost = reason
        self._lost(self.replica, reason)

    def restart(self, model: Any) -> None:
        """Come back: it serves version 0 again."""
        served = ServedEngine(make_engine(model, replica=self.replica), "token")
        served.resume(0, Deadline(5))
        with self._lock:
            self._open, self.taken, self.served = {}, [], served
            self.lost = ""

    def late(self, outputs: list[Output]) -> None:
        """Say something that is too late."""
        self._outputs(self.replica, outputs)

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _decode(self) -> None:
        while not self._over.wait(self._pause if self.served.num_running else 0.002):
            with self._lock:
                outputs = [] if self.lost else self._closed(self.served.step())
            if outputs:
                self._outputs(self.replica, outputs)

    def _closed(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            del self._open[output.key]
        return outputs

    def _known(self, request: Request, made: list[Segment]) -> Request:
        """Return a request with all of what was made but the last few tokens."""
        before, now = (sum(len(segment.token_ids) for segment in segments) for segments in (request.prefix, made))
        keep = max(before, now - self._random.randint(0, self._forgets))
        prefix: list[Segment] = []
        for segment in made:
            part = min(keep, len(segment.token_ids))
            keep -= part
            if part:
                prefix.append(replace(segment, token_ids=segment.token_ids[:part], logprobs=segment.logprobs[:part]))
        return replace(request, prefix=tuple(prefix))

    def _require_life(self) -> None:
        if self.lost:
            raise ReplicaLostError(f"replica {self.replica} is gone: {self.lost}")
