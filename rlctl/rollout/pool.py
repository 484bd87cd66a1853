"""Many replicas as one rollout engine: requests are spread, and go on elsewhere when a replica goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.event_base import Event
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import ReplicaClient
from rlctl.rollout.dispatcher import Dispatcher
from rlctl.rollout.ledger import Inbox
from rlctl.rollout.pool_stats import PoolStats
from rlctl.rollout.seats import ReplicaChange, Seat
from rlctl.sync.deadline import Deadline
from rlctl.units import format_duration

_POLL = 0.1  # seconds between looks at whether a replica serves again: nobody tells


class ReplicaPool:
    """See ``RolloutEngine`` for ``submit``, ``step``, ``generate`` and ``num_running``. Calls may come from any thread;
    ``generate`` may run in one beside ``step`` in another, and neither returns the other's outputs. Every request that
    was taken has one output.

    A replica gets requests once it serves. While replicas are held (``hold``, ``syncing``), one that does not serve was
    stopped on purpose and keeps what it has; at other times it is fenced: it gets nothing new, and what it has ends
    aborted. What a lost one had is sent to another with the prefix last known. While none serves, requests wait. The
    clients are not the pool's: it closes none.

    Args:
        clients: the replicas.
        deterministic: lockstep. ``step`` is then one decode step of every replica that has requests, all at once, and
            returns what ended by key; requests are routed by hash. The clients must be in lockstep too.
        on_change: told of replicas, from the thread that learns of it. It must not call the pool.
        patience: seconds that ``step`` and ``generate`` wait for a replica when none is left to send requests to.
        call_timeout: seconds that a replica has for an abort, and in lockstep for a decode step. One that takes longer
            is given up as if it had died.
        tell: told all that decides where a request goes, for the event log; it must not wait, and not call the pool.
    """

    def __init__(
        self,
        clients: Iterable[ReplicaClient] = (),
        *,
        deterministic: bool = False,
        on_change: Callable[[ReplicaChange], None] = lambda _: None,
        patience: float = 60.0,
        call_timeout: float = 60.0,
        tell: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self._lockstep = deterministic
        self._patience = patience
        self._call_timeout = call_timeout
        self._inbox = Inbox()
        self._none_since: float | None = None
        self._at = Dispatcher(lockstep=deterministic, on_change=on_change, call_timeout=call_timeout, tell=tell)
        self._changed = self._at.changed
        self._ledger = self._at.ledger
        for client in clients:
            self.add(client)

    # --- requests ---

    @property
    def num_running(self) -> int:
        """Requests submitted whose output ``step`` has not returned."""
        with self._changed:
            return self._inbox.pending

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests and send them. Raises UsageError for one that cannot be served."""
        with self._changed:
            self._ledger.admit(requests, self._inbox)
        self._at.send()

    def step(self, timeout: float = 1.0) -> list[Output]:
        """Return what has ended, finished or aborted; wait up to ``timeout`` seconds for the first.

        Raises:
            RlctlError: no replica is left to send requests to, and none came within the patience.
        """
        self._advance(self._inbox, Deadline(timeout))
        with self._changed:
            return self._inbox.take()

    def generate(self, requests: Sequence[Request], timeout: float = 3600.0) -> list[Output]:
        """Return the outputs of ``requests``, in their order. Those that a sync aborts are continued; ``abort`` ends
        them.

        Raises:
            RlctlError: they did not end within ``timeout`` seconds, or no replica is left. They are given up.
        """
        inbox, deadline = Inbox(), Deadline(timeout)
        waiting = {request.key: request for request in requests}
        done: dict[RequestKey, Output] = {}
        with self._changed:
            self._ledger.admit(requests, inbox)
        try:
            while waiting:
                deadline.check(f"waiting for {len(waiting)} of {len(requests)} responses")
                self._advance(inbox, deadline)
                with self._changed:
                    for output in inbox.take():
                        request = waiting.pop(output.key)
                        if output.finish_reason == "abort" and output.key not in inbox.ordered:
                            waiting[output.key] = replace(request, prefix=tuple(output.segments))
                            self._ledger.admit([waiting[output.key]], inbox)
                        else:
                            done[output.key] = output
        finally:
            if waiting:
                inbox.closed = True
                self.abort(waiting)
        return [done[request.key] for request in requests]

    def abort(self, keys: Iterable[RequestKey] | None = None) -> None:
        """End the named requests (None: all), keeping the tokens made so far; unknown keys are ignored. Their outputs
        come out of ``step`` or ``generate``: when this returns they are there, in lockstep with the next step."""
        named: dict[int, list[RequestKey]] = {}
        with self._at.sending:
            with self._changed:
                for key in self._ledger.end(keys):
                    named.setdefault(self._ledger.stay_of(key), []).append(key)
                seats = [seat for seat in self._at.seats.values() if seat.epoch in named]
                self._changed.notify_all()
            for seat in seats:
                self._at.end(seat, named[seat.epoch])
        if not self._lockstep:
            theirs = [(key, epoch) for epoch, some in named.items() for key in some]
            self._await(lambda: all(self._ledger.stay_of(key) != epoch for key, epoch in theirs), self._call_timeout)

    # --- replicas ---

    def add(self, client: ReplicaClient) -> None:
        """Let a replica join. Raises UsageError when there is one of its name."""
        if client.replica in self._at.seats:
            raise UsageError(f"there is a replica {client.replica} already")
        self._at.sit(client)

    def remove(self, name: str, how: Literal["abort", "wait"] = "abort", timeout: float = 600.0) -> ReplicaClient:
        """Part with a replica: it gets no more requests, and what it has is aborted, or waited for. Returns its client,
        which has nothing of the pool's any more.

        Args:
            timeout: seconds to wait for requests to end; then they are aborted.
        """
        seat = self._seat(name)
        with self._at.sending, self._changed:
            self._at.give_no_more(seat)
        if how == "wait":
            self._await(lambda: not self._ledger.at(seat.epoch), timeout)
        if self._ledger.at(seat.epoch):
            self._at.end(seat, None)
            if not self._await(lambda: not self._ledger.at(seat.epoch), self._call_timeout):
                self._at.lose(
                    seat, f"it did not end its requests within {format_duration(self._call_timeout)}", died=False
                )
        self._at.leave(seat)
        return seat.client

    def replace(self, client: ReplicaClient) -> None:
        """Put a replica in the place of the one of its name, if there is one: what that has goes on elsewhere."""
        old = self._at.seats.get(client.replica)
        if old is not None:
            self._at.lose(old, "it was replaced", died=False)
        self._at.sit(client)

    def hold(self) -> None:
        """Replicas are about to be stopped on purpose. May be nested."""
        self._at.look()
        with self._changed:
            self._at.holds += 1
            self._at.mark()

    def release(self) -> None:
        """End a ``hold``: a replica that does not serve now is fenced. Conversations have left nothing in any KV cache,
        and go where the fewest requests are."""
        with self._changed:
            assert self._at.holds > 0, "release without hold"
            self._at.holds -= 1
            self._at.forget()
            self._at.mark()
            self._changed.notify_all()

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """``hold`` for as long as a weight sync takes."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def stats(self) -> PoolStats:
        """Return where requests are and what happened so far."""
        with self._changed:
            return PoolStats(
                requests={name: self._at.balancer.in_flight(name) for name in sorted(self._at.seats)},
                tokens=self._ledger.tokens(),
                waiting=self._ledger.waiting,
                resubmitted=self._at.moved.requests,
                tokens_kept=self._at.moved.kept,
                tokens_read_again=self._at.moved.read_again,
                late_outputs=self._at.late,
                stickiness_breaks=self._at.balancer.breaks,
            )

    def take_time(self) -> tuple[float, float]:
        """Return the seconds in which replicas decoded, and those in which they were there, summed over replicas, since
        the last call. Whether a replica serves is looked at when something comes, goes or is sent, and while somebody
        waits in ``step`` ten times a second."""
        with self._changed:
            self._at.mark()
            return self._at.time.take()

    def describe(self) -> str:
        """Say where requests are, and which replicas serve none and why."""
        with self._changed:
            parts = [f"{self._ledger.waiting} requests wait for a replica"] if self._ledger.waiting else []
            for name, seat in sorted(self._at.seats.items()):
                state = f"{seat.state} ({seat.why})" if seat.why else seat.state
                parts.append(f"{self._at.balancer.in_flight(name)} at {name}, {state}")
            if self._at.holds:
                parts.append("replicas are stopped for a sync or for the trainer")
            return "; ".join(parts) or "there is no replica"

    def close(self) -> None:
        """End the pool's threads."""
        self._at.close()

    # --- waiting ---

    def _advance(self, inbox: Inbox, deadline: Deadline) -> None:
        """Go on until something of ``inbox`` has ended, or the deadline; in lockstep by one step."""
        if self._lockstep:
            moved = self._at.round()
            with self._changed:
                self._require_replicas()
                if not moved and not inbox.ended:
                    self._changed.wait(min(deadline.remaining, _POLL))
            return
        while True:
            self._at.send()
            with self._changed:
                self._require_replicas()
                if inbox.ended or deadline.over:
                    return
                self._changed.wait(min(deadline.remaining, _POLL))

    def _await(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait until a state of the ledger is reached; False when it is not within the time."""
        deadline = Deadline(timeout)
        while True:
            moved = self._lockstep and self._at.round()
            with self._changed:
                if reached():
                    return True
                if deadline.over:
                    return False
                if not moved:
                    self._changed.wait(min(deadline.remaining, _POLL))

    def _require_replicas(self) -> None:
        """Raise RlctlError when replicas die of a request, or when requests wait and none has served for too long."""
        seats = self._at.seats.values()
        if self._ledger.deadly:
            raise RlctlError(
                f"replicas died one after another, each with request {tuple(self._ledger.deadly[0])} before it made a "
                "token of it",
                fix="the replicas' own logs say more",
            )
        if not self._ledger.waiting or self._at.holds or any(seat.takes_requests for seat in seats):
            self._none_since = None
            return
        self._none_since = self._none_since or time.monotonic()
        if time.monotonic() - self._none_since > self._patience:
            each = "; ".join(f"{seat.name}: {seat.why}" for seat in seats) or "all have left"
            raise RlctlError(
                f"{self._ledger.waiting} requests wait, and no replica has served for "
                f"{format_duration(self._patience)} ({each})",
                fix="the replicas' own logs say more; the run can be resumed from its last checkpoint",
            )

    def _seat(self, name: str) -> Seat:
        seat = self._at.seats.get(name)
        if seat is None:
            raise UsageError(f"there is no replica {name}", fix=f"there are: {', '.join(self._at.seats) or 'none'}")
        return seat
