"""Replicas that live on the trainer's ranks, as the rollout side feeds them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.admission import check_request
from rlctl.rollout.finishing import outputs_of
from rlctl.rollout.on_ranks import Seat
from rlctl.runtime.hybrid.ranks import DeviceRanks

# Decode steps of one order: an order costs every rank a message, and what ends waits for its end.
TICKS = 4


class RankReplicas:
    """See ``RolloutEngine`` for ``submit``, ``step``, ``generate`` and ``num_running``. Replicas decode side by side,
    and equally many steps, so that what is made depends on no clock. The samples of a prompt go to one replica.

    Args:
        ranks: their processes.
        seats: of the ranks.
        vocab_size, max_length: for requests that cannot be served.
    """

    def __init__(self, ranks: DeviceRanks, seats: Sequence[Seat], *, vocab_size: int, max_length: int) -> None:
        self._ranks = ranks
        self._speakers = [rank for rank, seat in enumerate(seats) if seat.part == 0]
        self._count = len(self._speakers)
        self._vocab_size, self._max_length = vocab_size, max_length
        self._changed = threading.RLock()
        self._at: dict[RequestKey, int] = {}
        self._waiting: list[list[Request]] = [[] for _ in range(self._count)]
        self._ended: list[Output] = []

    @property
    def num_running(self) -> int:
        """Requests submitted whose output has not been returned."""
        with self._changed:
            return len(self._at) + len(self._ended)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests. Raises UsageError (and takes none) when one cannot be served."""
        with self._changed:
            taken = {*self._at, *(output.key for output in self._ended)}
            for request in requests:
                check_request(request, taken, vocab_size=self._vocab_size, max_length=self._max_length)
                taken.add(request.key)
            for replica, mine in self._dealt(requests):
                self._waiting[replica] += mine
                self._at.update((request.key, replica) for request in mine)

    def step(self, timeout: float = 0.0) -> list[Output]:
        """Decode a few tokens of every request; return what ended. Nothing is waited for: ``timeout`` is not used."""
        del timeout
        with self._changed:
            found, self._ended = self._ended, []
            if self._at:
                requests, self._waiting = self._waiting, [[] for _ in range(self._count)]
                found += self._took(self._said("decode", requests=_plain(requests), ticks=TICKS))
        return found

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the outputs of ``requests``, in their order; those of others come by ``step``."""
        with self._changed:
            self.submit(requests)
            mine, others = outputs_of(requests, self.step)
            self._ended += others
        return mine

    def abort(self) -> None:
        """End all requests, keeping the tokens made so far; their outputs come out of ``step``."""
        with self._changed:
            if not self._at:
                return
            waiting = [request for some in self._waiting for request in some]
            self._waiting = [[] for _ in range(self._count)]
            ended = [Output(request.key, list(request.prefix), "abort") for request in waiting]
            ended += self._said("abort")
            self._ended += self._took(sorted(ended, key=lambda output: output.key))

    def probe(self, requests: Sequence[Request]) -> list[list[Output]]:
        """Return what each replica answers to the same requests. None may be running."""
        with self._changed:
            plain = _plain([list(requests)] * self._count)
            said = self._ranks.call_each("generate", requests=plain)
        return [msgspec.convert(said[rank], list[Output]) for rank in self._speakers]

    def describe(self) -> str:
        """Say where requests are."""
        with self._changed:
            counts = [sum(1 for at in self._at.values() if at == replica) for replica in range(self._count)]
            return ", ".join(f"{count} requests at replica {replica}" for replica, count in enumerate(counts))

    def _dealt(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Request]]]:
        """Yield (replica, the requests of one prompt): where the fewest are."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.key.ordinal, []).append(request)
        loads = [0] * self._count
        for replica in self._at.values():
            loads[replica] += 1
        for mine in groups.values():
            replica = loads.index(min(loads))
            loads[replica] += len(mine)
            yield replica, mine

    def _said(self, operation: str, **arguments: Any) -> list[Output]:
        said = self._ranks.call_each(operation, **arguments)
        return [output for rank in self._speakers for output in msgspec.convert(said[rank], list[Output])]

    def _took(self, outputs: Iterable[Output]) -> list[Output]:
        found = list(outputs)
        for output in found:
            del self._at[output.key]
        return found


def _plain(requests: Sequence[Sequence[Request]]) -> Any:
    return msgspec.to_builtins(requests)
