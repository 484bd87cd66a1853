"""Which replica a request goes to. Pure: no threads, no clock, nothing random."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from rlctl.experience.segments import RequestKey


class Lease(NamedTuple):
    """A request's place at a replica, from ``acquire`` until ``release``.

    Attributes:
        replica: its name.
        epoch: which of its stays; no two stays, of whatever replicas, have the same.
        number: counts up over all leases.
    """

    replica: str
    epoch: int
    number: int


@dataclass
class _Stay:
    replica: str
    epoch: int
    leases: set[int] = field(default_factory=set)
    last: int = 0


class Balancer:
    """Leases places at replicas.

    A conversation (ordinal, sample) stays with the replica that had it, which may hold its prefix in the KV cache, for
    as long as that replica is there. A new one goes where the fewest requests are in flight; among equals where the
    longest time none was sent to, so that one after another they go round; then by name. A deterministic balancer asks
    neither load nor history: it ranks replicas by a hash of conversation and name, so that one that leaves moves its
    own conversations only.

    Args:
        deterministic: route by hash.
        remembered: most conversations whose replica is kept in mind; those not heard of for the longest are forgotten.
    """

    def __init__(self, *, deterministic: bool = False, remembered: int = 1 << 16) -> None:
        self._deterministic = deterministic
        self._remembered = remembered
        self._here: dict[str, _Stay] = {}
        self._stays: dict[int, _Stay] = {}  # those that leave too, until their last lease is released
        self._sticky: OrderedDict[tuple[int, int], Lease] = OrderedDict()
        self._epoch = 0
        self._number = 0
        self.breaks = 0

    @property
    def names(self) -> list[str]:
        """Replicas that leases are given for, sorted."""
        return sorted(self._here)

    def add(self, name: str) -> int:
        """Give leases for a replica from now on; return the epoch of its stay."""
        assert name not in self._here, f"replica {name} is here already"
        self._epoch += 1
        self._here[name] = self._stays[self._epoch] = _Stay(name, self._epoch)
        return self._epoch

    def remove(self, name: str) -> None:
        """Give no more leases for a replica. Those that there are count until they are released."""
        self._left(self._here.pop(name))

    def lost(self, name: str) -> None:
        """A replica is gone, and all its leases with it: whoever releases one later is not heard. A name that is not
        here is one that was removed and is lost now, or nothing."""
        self._here.pop(name, None)
        for stay in [s for s in self._stays.values() if s.replica == name]:
            stay.leases.clear()
            self._left(stay)

    def acquire(self, key: RequestKey, among: Collection[str] | None = None) -> Lease | None:
        """Lease a place for a request; None where there is no replica.

        Args:
            among: the replicas that may be given; None: all that are here.
        """
        names = self.names if among is None else [name for name in self.names if name in among]
        if not names:
            return None
        stay = self._here[self._choose(key, names)]
        self._number += 1
        stay.last = self._number
        stay.leases.add(self._number)
        lease = Lease(stay.replica, stay.epoch, self._number)
        self._remember(key, lease)
        return lease

    def release(self, lease: Lease) -> bool:
        """Give a place back. False, and nothing else, when it was given back before or its replica is gone."""
        stay = self._stays.get(lease.epoch)
        if stay is None or lease.number not in stay.leases:
            return False
        stay.leases.remove(lease.number)
        self._left(stay)
        return True

    def in_flight(self, name: str) -> int:
        """Leases of a replica that have not been given back."""
        return sum(len(stay.leases) for stay in self._stays.values() if stay.replica == name)

    def forget(self) -> None:
        """Forget which conversation is where: no replica holds anything of one any more."""
        self._sticky.clear()

    def _choose(self, key: RequestKey, names: list[str]) -> str:
        if self._deterministic:
            return max(names, key=lambda name: _rank(key, name))
        kept = self._sticky.get(key[:2])
        if kept is not None:
            stay = self._here.get(kept.replica)
            if stay is not None and stay.epoch == kept.epoch and kept.replica in names:
                return kept.replica
            self.breaks += 1
        return min(names, key=lambda name: (self.in_flight(name), self._here[name].last, name))

    def _remember(self, key: RequestKey, lease: Lease) -> None:
        if self._deterministic:
            return
        self._sticky[key[:2]] = lease
        self._sticky.move_to_end(key[:2])
        if len(self._sticky) > self._remembered:
            self._sticky.popitem(last=False)

    def _left(self, stay: _Stay) -> None:
        if not stay.leases and self._here.get(stay.replica) is not stay:
            self._stays.pop(stay.epoch, None)


def _rank(key: RequestKey, name: str) -> tuple[bytes, str]:
    text = f"{key.ordinal}:{key.sample}:{name}"
    return blake2b(text.encode(), digest_size=8).digest(), name
