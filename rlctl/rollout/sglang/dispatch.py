"""Requests on their way to a server and back: each sent by a thread of its own, as many at once as there are slots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import FinishReason, RequestKey, Segment
from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.slots import Pending
from rlctl.rollout.sglang import requests
from rlctl.rollout.sglang.answers import read_generated, segments_of
from rlctl.rollout.sglang.connection import SglangConnection
from rlctl.sync.deadline import Deadline

# An abort reaches only what the server has begun with: it is said again until all that was sent is answered.
_ABORT_AGAIN = 0.05


@dataclass
class _Job(Pending):
    """A request that was taken. ``rid``: of the attempt under way; ``ends``: it is not to be sent again."""

    rid: str = ""
    attempts: int = 0
    ends: bool = False


class Dispatch:
    """Held at first: what is submitted waits for ``open``.

    Args:
        server: the connection.
        replica: written into segments.
        max_slots: most requests that are sent at once.
        max_length: most tokens of prompt and response together.
        request_timeout: seconds within which every response must have ended.
        adapter: the name of the adapter to generate with, now.
    """

    def __init__(
        self,
        server: SglangConnection,
        replica: str,
        *,
        max_slots: int,
        max_length: int,
        request_timeout: float,
        adapter: Callable[[], str | None],
    ) -> None:
        self._server = server
        self._replica = replica
        self._max_slots = max_slots
        self._max_length = max_length
        self._request_timeout = request_timeout
        self._adapter = adapter
        self._changed = threading.Condition()  # of what follows
        self._held = True  # nothing is sent
        self._draining = False  # what comes waits for the next ``open``
        self._later: list[_Job] = []
        self._waiting: deque[_Job] = deque()
        self._sent: dict[RequestKey, _Job] = {}
        self._ended: list[Output] = []
        self._fault: RlctlError | None = None
        self._threads = ThreadPoolExecutor(max_slots, thread_name_prefix=f"sglang-{replica}")

    @property
    def num_running(self) -> int:
        """Requests taken whose output has not been returned."""
        with self._changed:
            return len(self._later) + len(self._waiting) + len(self._sent) + len(self._ended)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; does not wait."""
        with self._changed:
            jobs = [_Job(request, list(request.prefix)) for request in requests]
            (self._later if self._draining else self._waiting).extend(jobs)
            self._send()

    def outputs(self, timeout: float) -> list[Output]:
        """Return what ended; waits up to ``timeout`` seconds for something. Raises the first error of a request."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended) or self._fault is not None, timeout)
            ended, self._ended = self._ended, []
            if not ended:
                self._raise_fault()
            return ended

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """Return what earlier calls have made of what is sent; of the call under way nothing is known."""
        with self._changed:
            return {key: list(job.segments) for key, job in self._sent.items() if job.segments}

    def open(self) -> None:
        """Send what waits, and what comes."""
        with self._changed:
            self._held = self._draining = False
            self._waiting.extend(self._later)
            self._later.clear()
            self._send()

    def hold(self) -> None:
        """Send nothing more; what was sent goes on."""
        with self._changed:
            self._held = True

    def drain(self, deadline: Deadline) -> None:
        """Wait for the end of everything that was submitted so far, then hold."""
        with self._changed:
            self._draining = not self._held
            try:
                done = self._changed.wait_for(
                    lambda: self._fault is not None or not (self._sent or (self._waiting and not self._held)),
                    deadline.remaining,
                )
                self._raise_fault()
                if not done:
                    raise deadline.error(f"waiting for {len(self._sent) + len(self._waiting)} requests to end")
            finally:
                self._held = True

    def end(self, keys: Iterable[RequestKey] | None, deadline: Deadline) -> None:
        """End the named requests (None: all) with what they have made. Returns when the server has answered."""
        named = None if keys is None else set(keys)
        with self._changed:
            self._drop_unsent(named)
        while rids := self._under_way(named):
            for rid in [None] if named is None else rids:
                self._server.ask(requests.abort(rid), deadline)
            deadline.check(f"waiting for {len(rids)} requests to end")
            with self._changed:
                self._changed.wait_for(
                    lambda: self._fault is not None or not self._sent, min(_ABORT_AGAIN, deadline.remaining)
                )
                self._raise_fault()

    def fail(self, error: RlctlError) -> None:
        """Hold, and have ``outputs`` raise an error, if it is the first."""
        with self._changed:
            self._held = True
            self._fault = self._fault or error
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more, and wait for nothing."""
        self.hold()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- inside; with ``_changed`` held, but for ``_generate`` ---

    def _send(self) -> None:
        while not self._held and self._waiting and len(self._sent) < self._max_slots:
            job = self._waiting.popleft()
            ended = job.ended()
            if ended is not None:
                self._end(job, ended)
                continue
            self._sent[job.request.key] = job
            job.rid = requests.request_id(job.request, job.attempts)
            job.attempts += 1
            self._threads.submit(self._generate, job)

    def _generate(self, job: _Job) -> None:
        """Ask for the rest of one response."""
        try:
            self._require_room(job.request)
            made = [token for segment in job.segments for token in segment.token_ids]
            call = requests.generate(job.request, made, job.rid, adapter=self._adapter())
            found = read_generated(self._server.ask(call, Deadline(self._request_timeout)))
            segments = segments_of(found, self._replica)
        except RlctlError as error:
            self.fail(error)
            return
        with self._changed:
            del self._sent[job.request.key]
            for segment in segments:
                job.add(segment)
            ended = job.ended()
            if ended is None and (job.ends or found.meta_info.finish_reason.type == "abort"):
                ended = "abort"
            if ended is not None:
                self._end(job, ended)
            else:  # a stop token of the model's configuration, which is none of this request's
                self._waiting.appendleft(job)
            self._send()
            self._changed.notify_all()

    def _require_room(self, request: Request) -> None:
        prompt, new = len(request.prompt_ids), request.params.max_new_tokens
        if not prompt or prompt + new > self._max_length:
            raise UsageError(
                f"{prompt} prompt tokens and {new} new ones do not fit max_length {self._max_length}",
                where=f"request {tuple(request.key)}",
                fix="raise max_length or lower max_new_tokens" if prompt else "give a prompt",
            )

    def _end(self, job: _Job, reason: FinishReason) -> None:
        self._ended.append(Output(job.request.key, job.segments, reason))
        self._changed.notify_all()

    def _drop_unsent(self, named: set[RequestKey] | None) -> None:
        """End what waits, and send nothing of it again that was sent."""
        for queue in (self._later, self._waiting):
            for job in [job for job in queue if named is None or job.request.key in named]:
                queue.remove(job)
                self._end(job, "abort")
        for key, job in self._sent.items():
            job.ends = job.ends or named is None or key in named

    def _under_way(self, named: set[RequestKey] | None) -> list[str]:
        with self._changed:
            return [job.rid for key, job in self._sent.items() if named is None or key in named]

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault
