"""A NIXL agent that reads: its memory is registered once, and what it has under way ends when it is closed.

Processes only read from each other; nobody writes into another's memory. So a peer that was given up, or that wakes up
late, can do no harm, and no bucket or tensor is written to after the agent of its own process is closed.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import msgspec
import torch

from rlctl.sync.backends.nixl_door import with_door
from rlctl.sync.backends.nixl_library import errors, make_agent
from rlctl.sync.engine import EngineOptions
from rlctl.sync.errors import PeerLostError
from rlctl.sync.tensor_meta import Size
from rlctl.units import format_bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Bytes in a process's memory. ``device``: the number of a CUDA device, -1 for the host's."""

    address: Size
    nbytes: Size
    device: int

    @classmethod
    def of(cls, memory: torch.Tensor) -> Place:
        """Return the place of a contiguous uint8 tensor."""
        return cls(memory.data_ptr(), memory.numel(), memory.get_device())

    def part(self, start: int, nbytes: int) -> Place:
        """Return ``nbytes`` of it from ``start``."""
        return self if nbytes == self.nbytes else Place(self.address + start, nbytes, self.device)


class _Region(NamedTuple):
    """Registered memory; the storage keeps it from being used for anything else."""

    end: int
    storage: torch.UntypedStorage


class NixlAgent:
    """See the module. Used by one thread at a time.

    Attributes:
        name: that no other agent has.
        registrations: how many regions were registered so far.
        door: to its port.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.name = uuid.uuid4().hex
        self.registrations = 0
        extras = options.extras
        devices, transports = extras.get("devices"), extras.get("transports")
        self._agent, self.door = with_door(lambda: make_agent(self.name, options.host, devices, transports))
        self._errors = errors()
        self._regions: dict[int, _Region] = {}
        self._starts: list[int] = []
        self._readings: set[Reading] = set()  # under way
        self._kept: WeakSet[Reading] = WeakSet()  # as long as their batches

    # Memory

    def register(self, memory: Mapping[int, torch.UntypedStorage]) -> None:
        """Make memory, by its address (``storages``), known to the transport, where it is not yet."""
        for start, storage in memory.items():
            known = self._regions.get(start)
            if known is None or known.end < start + storage.nbytes():
                self._regions[start] = self._registered(start, storage)
        self._starts = sorted(self._regions)

    def outdated(self, wanted: Collection[int]) -> bool:
        """Whether memory is registered that has moved, or that does not begin at a ``wanted`` address. Peers that know
        of it would read what is not there: such an agent is to be closed."""
        return any(r.storage.data_ptr() != start or start not in wanted for start, r in self._regions.items())

    def knows(self, place: Place) -> bool:
        """Whether all bytes of a place are registered."""
        found = bisect_right(self._starts, place.address) - 1
        return found >= 0 and place.address + place.nbytes <= self._regions[self._starts[found]].end

    def _registered(self, start: int, storage: torch.UntypedStorage) -> _Region:
        device = storage.device.index if storage.device.type == "cuda" else -1
        with self._translated(f"registering {format_bytes(storage.nbytes())} of memory"):
            self._agent.register_memory([(start, storage.nbytes(), max(device, 0), "")], _kind(device))
        self.registrations += 1
        return _Region(start + storage.nbytes(), storage)

    # Peers

    @property
    def metadata(self) -> bytes:
        """What a peer must know to read from here: where to connect, and all memory registered so far."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def meet(self, metadata: bytes, peer: str) -> None:
        """Learn a peer's metadata, or what is new in it."""
        self._let_go()
        with self._translated(f"connecting to {peer}"):
            self._agent.add_remote_agent(metadata)

    def part(self, name: str) -> None:
        """Forget the peer with the agent ``name``."""
        self._let_go()
        with suppress(*self._errors):  # one that was never met, or is gone already
            self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        """Let the transport answer its peers: it has no thread of its own."""
        self._agent.get_new_notifs()

    def read(self, name: str, peer: str, batch: Batch) -> list[Reading]:
        """Begin to read a batch of which nothing is under way. Raises PeerLostError."""
        with self._translated(f"reading from {peer}"):
            if not batch.readings or any(reading.handle is None for reading in batch.readings):
                batch.readings = self._prepared(name, peer, batch.pairs)
            for reading in batch.readings:
                self._readings.add(reading)
                reading.under_way = True
                self._note(reading, self._agent.transfer(reading.handle))
        return batch.readings

    def _prepared(self, name: str, peer: str, pairs: Iterable[tuple[Place, Place]]) -> list[Reading]:
        by_kind = defaultdict[tuple[str, str], list[tuple[Place, Place]]](list)
        for here, there in pairs:
            by_kind[_kind(here.device), _kind(there.device)].append((here, there))
        found = []
        for (mine, theirs), group in by_kind.items():
            to = self._agent.get_xfer_descs([_descriptor(here) for here, _ in group], mine)
            out_of = self._agent.get_xfer_descs([_descriptor(there) for _, there in group], theirs)
            found.append(Reading(self._agent.initialize_xfer("READ", to, out_of, name), peer))
        self._kept.update(found)
        return found

    def _let_go(self) -> None:
        """Forget what was prepared: it knows peers as they were. What is under way is forgotten when it is done."""
        for reading in list(self._kept - self._readings):
            with suppress(*self._errors):
                reading.handle.release()
            reading.handle = None
        self._kept.clear()

    def done(self, reading: Reading) -> bool:
        """Whether all bytes of a read are here. Raises PeerLostError."""
        if reading.under_way:
            with self._translated(f"reading from {reading.peer}"):
                self._note(reading, self._agent.check_xfer_state(reading.handle))
        return not reading.under_way

    def _note(self, reading: Reading, state: str) -> None:
        if state == "ERR":
            raise PeerLostError(f"reading from {reading.peer} failed")
        if state == "DONE":
            reading.under_way = False
            self._readings.discard(reading)
            if reading not in self._kept:
                reading.handle.release()
                reading.handle = None

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise PeerLostError(f"{what} failed: {error}") from error

    def close(self) -> None:
        """End everything under way and let all memory go: after this nothing is written to it."""
        self._let_go()
        for reading in self._readings:  # a handle keeps the agent, and so its connections
            with suppress(*self._errors):  # it cannot be given up alone; it is with the agent
                reading.handle.release()
            reading.handle = None
        self._readings.clear()
        self._regions, self._starts = {}, []
        self.door.close()
        del self._agent  # closes the connections; the memory is deregistered with it


class Reading:
    """A read that was prepared and can be made again while it has a ``handle``."""

    def __init__(self, handle: Any, peer: str) -> None:
        self.handle = handle
        self.peer = peer
        self.under_way = False


class Batch:
    """Pairs of (here, there) of equal length that are read in one call, and how that was prepared last."""

    def __init__(self, pairs: Sequence[tuple[Place, Place]]) -> None:
        self.pairs = pairs
        self.readings: list[Reading] = []


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return where tensors begin; 0 for those that have no memory of their own."""
    return [tensor.data_ptr() if type(tensor) in _PLAIN else 0 for tensor in tensors]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the memory of plain tensors, by its address."""
    found = (tensor.untyped_storage() for tensor in tensors if type(tensor) in _PLAIN)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _kind(device: int) -> str:
    return "DRAM" if device < 0 else "VRAM"


def _descriptor(place: Place) -> tuple[int, int, int]:
    return place.address, place.nbytes, max(place.device, 0)
