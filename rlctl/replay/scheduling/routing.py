"""The replicas of a pool told again: which one each request went to, from what was asked, ended and lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlctl.errors import UsageError
from rlctl.experience.event_base import Event
from rlctl.experience.schedule_events import (
    Asked,
    Landed,
    PlacesForgotten,
    Recall,
    Routed,
    SeatChanged,
    Withdrawn,
)
from rlctl.experience.segments import RequestKey, Segment
from rlctl.replay.scheduling.expecting import DisagreementError, require
from rlctl.rollout.balancer import Balancer
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.ledger import Inbox, Ledger

# A token that ends a response, and one that does not.
_STOP, _OTHER = 1, 0
_PARAMS = SamplingParams(max_new_tokens=1 << 40, stop_token_ids=(_STOP,))


class Routing:
    """The real ``Balancer`` and ``Ledger``, driven by one attempt's events.

    Args:
        deterministic: as the pool was.
    """

    def __init__(self, *, deterministic: bool) -> None:
        self._balancer = Balancer(deterministic=deterministic)
        self._told: list[Event] = []
        self._ledger = Ledger(self._balancer, tell=self._told.append)
        self._inbox = Inbox()
        self._seats: dict[int, tuple[str, str]] = {}  # epoch -> replica, what it does
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            SeatChanged: self._seat,
            Asked: self._asked,
            Routed: self._routed,
            Recall: self._recalled,
            Landed: self._landed,
            Withdrawn: self._withdrawn,
            PlacesForgotten: lambda _: self._balancer.forget(),
        }

    def take(self, event: Event) -> None:
        """Take an event of the pool. Raises DisagreementError."""
        self._told.clear()
        self.handlers[type(event)](event)

    def _seat(self, event: SeatChanged) -> None:
        if event.change == "joined":
            require(event.replica not in self._balancer.names, event, "replicas", "it is here already")
            epoch = self._balancer.add(event.replica)
            require(event.epoch == epoch, event, "replicas", f"its stay is number {epoch}")
            self._seats[epoch] = (event.replica, "joined")
            return
        name, before = self._seats.get(event.epoch, ("", "absent"))
        require(name == event.replica, event, "replicas", f"stay {event.epoch} is {name or 'nobody'}'s")
        follows = {"serving": ("joined", "fenced"), "fenced": ("serving",)}.get(event.change)
        require(follows is None or before in follows, event, "replicas", f"it is {before}")
        self._seats[event.epoch] = (name, event.change)
        if event.change == "leaving":
            self._balancer.remove(name)
        elif event.change == "lost":
            self._balancer.lost(name)
        elif event.change == "left":
            require(before in ("leaving", "lost"), event, "replicas", f"it is {before}")
            require(not self._ledger.at(event.epoch), event, "replicas", "it has requests")

    def _asked(self, event: Asked) -> None:
        try:
            self._ledger.admit([_request(key) for key in event.keys], self._inbox)
        except UsageError as error:
            raise DisagreementError(event, "routing", f"{error.where}: {error.message}") from error

    def _routed(self, event: Routed) -> None:
        serving = {name for name, does in self._seats.values() if does == "serving"}
        require(serving >= set(event.among), event, "routing", f"of these, only {sorted(serving)} serve")
        self._ledger.route(event.among)
        here = self._last(event, Routed)
        keys = [tuple(key) for key in here.keys]
        require(event.keys == keys, event, "routing", f"{event.keys} go, and {keys} wait here")
        for key, told, found in zip(keys, event.replicas, here.replicas, strict=True):
            require(told == found, event, "routing", f"request {key} went to {told}, and goes to {found} here")

    def _recalled(self, event: Recall) -> None:
        gained = dict(zip(event.keys, event.gained, strict=True))
        known = [self._known(key, gained[key]) for key in event.keys]
        known += [self._known(key, 0, whole=True) for key in event.whole]
        self._ledger.recall(event.epoch, known, died=event.died)
        here = self._last(event, Recall)
        keys = [tuple(key) for key in here.keys]
        require(event.keys == keys, event, "routing", f"{event.keys} wait again, and {keys} do here")
        whole = [tuple(key) for key in here.whole]
        require(event.whole == whole, event, "routing", f"{event.whole} had ended, and {whole} have here")

    def _landed(self, event: Landed) -> None:
        for key in event.keys:
            landed = self._ledger.land(event.epoch, Output(RequestKey(*key), [], "stop"))
            require(landed, event, "routing", f"request {key} is not at {event.replica}")
        for key in event.late:
            landed = self._ledger.land(event.epoch, Output(RequestKey(*key), [], "stop"))
            require(not landed, event, "routing", f"request {key} is at {event.replica}, and not late")
        self._inbox.take()

    def _withdrawn(self, event: Withdrawn) -> None:
        keys = [RequestKey(*key) for key in event.keys]
        if event.why == "ended":
            self._ledger.end(keys)
            ended = [tuple(key) for one in self._told if isinstance(one, Withdrawn) for key in one.keys]
            require(event.keys == ended, event, "routing", f"of them, {ended} wait for a replica")
            self._inbox.take()
            return
        for key in keys:
            require(self._ledger.stay_of(key) > 0, event, "routing", f"request {tuple(key)} is not at a replica")
        if event.why == "refused":
            self._ledger.drop(keys)
        else:
            self._ledger.unroute([_request(key) for key in keys])

    def _known(self, key: Iterable[int], gained: int, *, whole: bool = False) -> Request:
        """Return a request with what is known to have been made of it now."""
        had = self._ledger.made(RequestKey(*key))
        ids = [_OTHER] * (had + gained) + [_STOP] * whole
        return _request(key, (Segment(ids, [0.0] * len(ids)),) if ids else ())

    def _last(self, event: Event, kind: type[Any]) -> Any:
        found = self._told[-1] if self._told else None
        require(isinstance(found, kind), event, "routing", "nothing of the kind is decided here")
        return found


def _request(key: Iterable[int], prefix: tuple[Segment, ...] = ()) -> Request:
    return Request(RequestKey(*key), (0,), _PARAMS, 0, prefix)
