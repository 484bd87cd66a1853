"""Sends a pool's requests to its replicas, and takes back what ends or is lost there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from rlctl.errors import RlctlError
from rlctl.experience.event_base import Event
from rlctl.experience.schedule_events import Landed, PlacesForgotten, SeatChanged
from rlctl.experience.segments import RequestKey
from rlctl.rollout.balancer import Balancer
from rlctl.rollout.base import Output, Request
from rlctl.rollout.busy_time import BusyTime
from rlctl.rollout.client import ReplicaClient, ReplicaLostError
from rlctl.rollout.ledger import Ledger, Recalled
from rlctl.rollout.seats import ReplicaChange, Seat
from rlctl.sync.deadline import Deadline


class Dispatcher:
    """The replicas of a pool, and the requests. What is said here of threads holds for the pool.

    Nothing calls a client while it holds ``changed``: a client may be about to tell us something. Whoever hands
    requests over or asks for their end holds ``sending``, so that the two reach a client in this order.

    Args:
        lockstep: outputs come from ``round`` only.
        on_change: told of replicas.
        call_timeout: seconds that a replica has for an abort or a decode step.
        tell: told all that decides where a request goes, in its order, holding ``changed``: it must not wait.

    Attributes:
        changed: notified when an output came, or a replica came, went or was let go.
        holds: how many want replicas that do not serve not to be taken for fenced.
        late: outputs that nobody waited for.
        moved: sums over the replicas that were lost.
        time: in which replicas decode, as far as their states are known here.
    """

    def __init__(
        self,
        *,
        lockstep: bool,
        on_change: Callable[[ReplicaChange], None],
        call_timeout: float,
        tell: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.changed = threading.Condition()
        self.sending = threading.RLock()
        self.balancer = Balancer(deterministic=lockstep)
        self.ledger = Ledger(self.balancer, tell=tell)
        self.seats: dict[str, Seat] = {}
        self.holds = 0
        self.late = 0
        self.moved = Recalled()
        self.time = BusyTime()
        self._lockstep = lockstep
        self._tell = tell
        self._on_change = on_change
        self._call_timeout = call_timeout
        self._news: deque[ReplicaChange] = deque()
        self._threads: ThreadPoolExecutor | None = None

    # --- replicas ---

    def sit(self, client: ReplicaClient) -> None:
        """Let a replica in. One of its name has been lost before, or there was none."""
        with self.changed:
            seat = Seat(client, self.balancer.add(client.replica))
            self.seats[client.replica] = seat
            self._note(seat, "joined")
            self.changed.notify_all()
        client.listen(lambda _, outputs: self.arrived(seat, outputs), lambda _, why: self.lose(seat, why))
        if client.lost:  # before it knew whom to tell
            self.lose(seat, client.lost)
        self.announce()

    def lose(self, seat: Seat, why: str, *, died: bool = True) -> None:
        """A replica is gone: have what it had wait for another. Harmless when repeated.

        Args:
            died: it said so itself, or its process did; else it may still be at work.
        """
        known = seat.client.unfinished()
        with self.changed:
            seat.died = seat.died or died
            if seat.state == "lost" or self.seats.get(seat.name) is not seat:
                return
            seat.state, seat.why = "lost", why
            self.balancer.lost(seat.name)
            self._tell(SeatChanged(replica=seat.name, epoch=seat.epoch, change="lost"))
            self.mark()
            recalled = self.ledger.recall(seat.epoch, known, died=died)
            self.moved += recalled
            self._news.append(ReplicaChange(seat.name, "lost", seat.why, recalled.requests))
            self.changed.notify_all()
        self.announce()

    def look(self) -> None:
        """See who serves. While replicas are held, nothing is made of it: so those that come back from a sync one after
        another are there all at once when requests are routed."""
        with self.changed:
            if self.holds:
                return
            back = [seat for seat in self.seats.values() if seat.back]
        for seat in back:
            self.sit(seat.client)
        with self.changed:
            for seat in self.seats.values():
                state = seat.look()
                if state is not None:
                    self._note(seat, state)
        self.announce()

    def leave(self, seat: Seat) -> None:
        """Let go of a replica that has nothing left."""
        with self.changed:
            if self.seats.get(seat.name) is seat:
                del self.seats[seat.name]
            self._note(seat, "left")
            self.changed.notify_all()
        self.announce()

    def give_no_more(self, seat: Seat) -> None:
        """Send a replica that is going to leave nothing any more; called holding ``changed``."""
        if seat.state != "lost":
            seat.state = "leaving"
            self.balancer.remove(seat.name)
            self._tell(SeatChanged(replica=seat.name, epoch=seat.epoch, change="leaving"))

    def forget(self) -> None:
        """No replica holds anything of a conversation any more; called holding ``changed``."""
        self.balancer.forget()
        self._tell(PlacesForgotten())

    # --- requests ---

    def arrived(self, seat: Seat, outputs: Sequence[Output]) -> None:
        """Take what ended at a replica; what has gone on elsewhere is counted, and forgotten."""
        with self.changed:
            news = Landed(replica=seat.name, epoch=seat.epoch, keys=[])
            for output in outputs:
                (news.keys if self.ledger.land(seat.epoch, output) else news.late).append(output.key)
            self.late += len(news.late)
            self._tell(news)
            self.mark()
            self.changed.notify_all()

    def send(self) -> None:
        """Hand what waits to replicas. Raises UsageError for a request that one refuses; it is forgotten."""
        with self.sending:
            self.look()
            with self.changed:
                fenced = [seat for seat in self.seats.values() if seat.unended]
            for seat in fenced:
                seat.unended = False
                self.end(seat, None)
            while batches := self._route():
                while batches:
                    seat, requests = batches.pop()
                    try:
                        seat.client.submit(requests)
                    except ReplicaLostError as error:
                        self._give_up(seat, error)
                    except BaseException:
                        with self.changed:
                            self.ledger.drop(request.key for request in requests)
                            for _, others in batches:
                                self.ledger.unroute(others)
                        raise
            with self.changed:
                self.mark()

    def mark(self) -> None:
        """Note which replicas decode now: those that serve and have requests. With ``changed`` held."""
        there = [seat for seat in self.seats.values() if seat.state != "lost"]
        busy = [s for s in there if s.client.serving is not None and self.balancer.in_flight(s.name)]
        self.time.mark(len(busy), len(there))

    def end(self, seat: Seat, keys: Collection[RequestKey] | None) -> None:
        """Have a replica end requests (None: all of the pool's); a replica that cannot is given up."""
        with self.sending:
            with self.changed:
                named = self.ledger.at(seat.epoch) if keys is None else keys
            if not named:
                return
            try:
                seat.client.abort(named, deadline=Deadline(self._call_timeout))
            except RlctlError as error:
                self._give_up(seat, error)

    def round(self) -> bool:
        """One decode step of every replica that has requests, all at once; then what ended, by key.

        Returns whether one of them serves.
        """
        with self.sending:
            self.send()
            with self.changed:
                busy = [s for _, s in sorted(self.seats.items()) if s.state != "lost" and self._busy(s)]
            if len(busy) > 1:
                self._threads = self._threads or ThreadPoolExecutor(thread_name_prefix="decode step")
                ticks = list(self._threads.map(self.tick, busy))
            else:
                ticks = [self.tick(seat) for seat in busy]
            ended = [
                (output.key, seat, output) for seat, outputs in zip(busy, ticks, strict=True) for output in outputs
            ]
            for _, seat, output in sorted(ended, key=lambda one: one[0]):
                self.arrived(seat, [output])
            return any(seat.client.serving is not None for seat in busy)

    def tick(self, seat: Seat) -> list[Output]:
        """One decode step of a replica; none of its outputs when it is gone."""
        try:
            return seat.client.tick(Deadline(self._call_timeout))
        except RlctlError as error:
            self._give_up(seat, error)
            return []

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def announce(self) -> None:
        """Tell of what has changed. Not with ``changed`` held."""
        while True:
            with self.changed:
                if not self._news:
                    return
                change = self._news.popleft()
            self._on_change(change)

    def _give_up(self, seat: Seat, error: RlctlError) -> None:
        died = isinstance(error, ReplicaLostError)
        self.lose(seat, (seat.client.lost if died else "") or error.message, died=died)

    def _route(self) -> list[tuple[Seat, list[Request]]]:
        with self.changed:
            batches = self.ledger.route([seat.name for seat in self.seats.values() if seat.takes_requests])
            return [(self.seats[name], requests) for name, requests in batches.items()]

    def _busy(self, seat: Seat) -> bool:
        return self.balancer.in_flight(seat.name) > 0

    def _note(self, seat: Seat, change: Literal["joined", "serving", "fenced", "left"]) -> None:
        self._tell(SeatChanged(replica=seat.name, epoch=seat.epoch, change=change))
        self._news.append(ReplicaChange(seat.name, change, "" if change in ("joined", "left") else seat.why))
