"""The requests that a pool of replicas has taken: where each one is, and who waits for it. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlctl.errors import UsageError
from rlctl.experience.event_base import Event
from rlctl.experience.schedule_events import Asked, Recall, Routed, Withdrawn
from rlctl.experience.segments import FinishReason, RequestKey, Segment
from rlctl.rollout.balancer import Balancer, Lease
from rlctl.rollout.base import Output, Request


@dataclass
class Inbox:
    """Where the outputs of some requests go.

    Attributes:
        pending: requests whose output has not been taken out.
        ended: outputs, in the order in which they came.
        ordered: keys whose end was asked for: their response is not to be continued.
        closed: nobody takes anything out any more.
    """

    pending: int = 0
    ended: list[Output] = field(default_factory=list)
    ordered: set[RequestKey] = field(default_factory=set)
    closed: bool = False

    def take(self) -> list[Output]:
        """Return what has ended, and let go of it."""
        ended, self.ended = self.ended, []
        self.pending -= len(ended)
        return ended


@dataclass
class Flight:
    """A request whose output has not come: at a replica, or (without a lease) waiting for one.

    Attributes:
        deaths: of replicas that had it, one after another, and had made nothing of it that is known.
    """

    request: Request
    inbox: Inbox
    lease: Lease | None = None
    deaths: int = 0


@dataclass(frozen=True)
class Recalled:
    """What was at a replica that is gone: requests that wait again, tokens known of them that a replica had made, and
    tokens of prompts and responses that another one has to read again."""

    requests: int = 0
    kept: int = 0
    read_again: int = 0

    def __add__(self, other: Recalled) -> Recalled:
        """Return the sums."""
        return Recalled(self.requests + other.requests, self.kept + other.kept, self.read_again + other.read_again)


class Ledger:
    """All requests in flight, by key. Each one that is admitted lands once, or is dropped.

    Args:
        balancer: leases the places.
        max_deaths: a request that so many replicas died of, as it seems, is sent to no other.
        tell: told what comes, where it goes, and what waits again.

    Attributes:
        deadly: those requests.
    """

    def __init__(
        self, balancer: Balancer, max_deaths: int = 5, *, tell: Callable[[Event], None] = lambda _: None
    ) -> None:
        self._balancer = balancer
        self._tell = tell
        self._max_deaths = max_deaths
        self.deadly: list[RequestKey] = []
        self._flights: dict[RequestKey, Flight] = {}
        self._waiting: dict[RequestKey, None] = {}  # in the order in which they are to be sent

    @property
    def waiting(self) -> int:
        """Requests that no replica has."""
        return len(self._waiting)

    def admit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Take requests; they wait. Raises UsageError, and takes none, when a key is in flight."""
        taken = set(self._flights)
        for request in requests:
            if request.key in taken:
                raise UsageError("a request with this key is in flight already", where=f"request {tuple(request.key)}")
            taken.add(request.key)
        for request in requests:
            self._flights[request.key] = Flight(request, inbox)
            self._waiting[request.key] = None
        inbox.pending += len(requests)
        self._tell(Asked(keys=[request.key for request in requests]))

    def route(self, among: Collection[str]) -> dict[str, list[Request]]:
        """Lease places for all that wait; return what is to be sent to each replica, in order. Without a replica they
        go on waiting."""
        batches: dict[str, list[Request]] = {}
        news = Routed(among=list(among), keys=[], replicas=[])
        for key in list(self._waiting):
            lease = self._balancer.acquire(key, among)
            if lease is None:
                break
            del self._waiting[key]
            flight = self._flights[key]
            flight.lease = lease
            batches.setdefault(lease.replica, []).append(flight.request)
            news.keys.append(key)
            news.replicas.append(lease.replica)
        if batches:
            self._tell(news)
        return batches

    def at(self, epoch: int) -> list[RequestKey]:
        """Return what is at a replica, of one of its stays."""
        return [key for key, flight in self._flights.items() if flight.lease and flight.lease.epoch == epoch]

    def land(self, epoch: int, output: Output) -> bool:
        """Take an output of a replica. False, and nothing else, when the request is not there: it ended, or went on
        elsewhere."""
        flight = self._flights.get(output.key)
        if flight is None or flight.lease is None or flight.lease.epoch != epoch:
            return False
        self._end(flight, output)
        return True

    def recall(self, epoch: int, known: Iterable[Request], *, died: bool) -> Recalled:
        """Have what was at a replica wait again, by key, before all others; each with the prefix that is known of it. A
        response that is whole by then ends instead.

        Args:
            known: requests as the replica had them, with what it is known to have made.
            died: whether the replica died, and one of the requests may be what it died of.
        """
        prefixes = {request.key: request.prefix for request in known}
        requests = kept = read_again = 0
        again: dict[RequestKey, None] = {}
        news = Recall(epoch=epoch, died=died, keys=[], gained=[])
        for key in sorted(self.at(epoch)):
            flight = self._flights[key]
            before = _tokens(flight.request.prefix)
            prefix = max(flight.request.prefix, prefixes.get(key, ()), key=_tokens)
            kept += _tokens(prefix) - before
            flight.request = replace(flight.request, prefix=prefix)
            reason = _ending(flight.request)
            if reason is not None:
                news.whole.append(key)
                self._end(flight, Output(key, list(prefix), reason))
                continue
            self._unlease(flight)
            flight.deaths = flight.deaths + died if _tokens(prefix) == before else 0
            if flight.deaths >= self._max_deaths:
                self.deadly.append(key)
                continue
            requests += 1
            read_again += len(flight.request.prompt_ids) + _tokens(prefix)
            again[key] = None
            news.keys.append(key)
            news.gained.append(_tokens(prefix) - before)
        self._waiting = again | self._waiting
        self._tell(news)
        return Recalled(requests, kept, read_again)

    def unroute(self, requests: Iterable[Request]) -> None:
        """Have requests wait again that were not sent after all."""
        news = Withdrawn(keys=[], why="unsent")
        for request in requests:
            self._unlease(self._flights[request.key])
            self._waiting[request.key] = None
            news.keys.append(request.key)
        self._tell(news)

    def drop(self, keys: Iterable[RequestKey]) -> None:
        """Forget requests that are not taken: no output of them is wanted."""
        news = Withdrawn(keys=[], why="refused")
        for key in keys:
            flight = self._flights.pop(key)
            self._waiting.pop(key, None)
            self._unlease(flight)
            flight.inbox.pending -= 1
            news.keys.append(key)
        self._tell(news)

    def end(self, keys: Iterable[RequestKey] | None) -> list[RequestKey]:
        """Mark the named requests (None: all) as not to be continued. Those that wait end at once, aborted.

        Returns the others.
        """
        elsewhere, news = [], Withdrawn(keys=[], why="ended")
        for key in [k for k in (list(self._flights) if keys is None else keys) if k in self._flights]:
            flight = self._flights[key]
            flight.inbox.ordered.add(key)
            if flight.lease is None:
                self._end(flight, Output(key, list(flight.request.prefix), "abort"))
                news.keys.append(key)
            else:
                elsewhere.append(key)
        if news.keys:
            self._tell(news)
        return elsewhere

    def stay_of(self, key: RequestKey) -> int:
        """Return the epoch of the stay of the replica that has a request; 0 where none has."""
        flight = self._flights.get(key)
        return flight.lease.epoch if flight is not None and flight.lease is not None else 0

    def made(self, key: RequestKey) -> int:
        """Return how many tokens of a request's response are known; 0 of one that is not here."""
        return _tokens(self._flights[key].request.prefix) if key in self._flights else 0

    def tokens(self) -> dict[str, int]:
        """Tokens of prompts and prefixes in flight, by replica."""
        tokens: dict[str, int] = {}
        for flight in self._flights.values():
            if flight.lease is not None:
                size = len(flight.request.prompt_ids) + _tokens(flight.request.prefix)
                tokens[flight.lease.replica] = tokens.get(flight.lease.replica, 0) + size
        return tokens

    def _end(self, flight: Flight, output: Output) -> None:
        del self._flights[output.key]
        self.deadly = [key for key in self.deadly if key != output.key]
        self._waiting.pop(output.key, None)
        self._unlease(flight)
        if flight.inbox.closed:
            flight.inbox.pending -= 1
        else:
            flight.inbox.ended.append(output)

    def _unlease(self, flight: Flight) -> None:
        if flight.lease is not None:
            self._balancer.release(flight.lease)
            flight.lease = None


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)


def _ending(request: Request) -> FinishReason | None:
    """Return how a response ended when its request's prefix is all of it."""
    made = [token for segment in request.prefix for token in segment.token_ids]
    if made and made[-1] in request.params.stop_token_ids:
        return "stop"
    return "length" if len(made) >= request.params.max_new_tokens else None
