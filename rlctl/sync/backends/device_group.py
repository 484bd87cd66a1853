"""One group of NCCL's or HCCL's, whose waits can be ended: it is not the trainer's, and a wait looks at the clock."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed

from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError
from rlctl.sync.rendezvous import MeetingStore
from rlctl.sync.work import Work

# How long an aborted communicator may take to leave the device's memory alone.
_ABORT_SECONDS = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


class DeviceGroup(ABC):
    """Rank 0 broadcasts, the others receive.

    Args:
        store: where the ranks meet.
        rank: of this process.
        peers: what errors call each rank.
        device: that the tensors are on.
        deadline: for all ranks to come.
    """

    def __init__(self, store: MeetingStore, rank: int, peers: list[str], device: str, deadline: Deadline) -> None:
        self._others = ", ".join(p for i, p in enumerate(peers) if i != rank)
        self._aborted: Future[None] | None = None
        self._ending = threading.Lock()
        self.ended = False
        what = f"connecting {peers[rank]} to {self._others}"
        self._group = self._make(store, rank, len(peers), deadline)
        # The library waits for the others by its own clock, so it does in a thread.
        connecting = call(lambda: self._connect(self._group, torch.device(device)), "connection of a device group")
        try:
            connecting.result(deadline.remaining)
        except TimeoutError as error:
            self.end_waits()
            raise deadline.error(what) from error
        except RuntimeError as error:
            self.end_waits()
            raise PeerLostError(f"{what}: {_line(error)}") from error

    @abstractmethod
    def _make(self, store: MeetingStore, rank: int, size: int, deadline: Deadline) -> Any:
        """Return the library's group, not connected."""

    def _connect(self, group: Any, device: torch.device) -> None:
        """Connect it, however long that takes: with a first broadcast, at which the libraries do so at the latest."""
        work = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], _from_rank_0())
        while not work.is_completed() and not self.ended:
            time.sleep(_LONGEST_PAUSE)
        if not self.ended:
            work.wait()

    @abstractmethod
    def _abort(self, group: Any) -> None:
        """End everything that is under way in it."""

    def broadcast(self, tensor: torch.Tensor, deadline: Deadline, what: str) -> Work[None]:
        """Begin to send (rank 0) or receive (others) a contiguous tensor of the device, after what the current stream
        has to do before. ``what`` is for the error."""
        what = f"{what} ({self._others})"
        deadline.check(what)
        if self.ended:
            raise PeerLostError(f"{what}: the group was ended")
        try:
            return _Broadcast(self, self._group.broadcast([tensor], _from_rank_0()), tensor, what)
        except RuntimeError as error:
            raise PeerLostError(f"{what}: {_line(error)}") from error

    def end_waits(self) -> None:
        """Abort the group in a thread of its own: whatever waits fails at its next look."""
        with self._ending:
            self.ended = True
            if self._aborted is None:
                self._aborted = call(lambda: self._abort(self._group), "end of a device group")

    def close(self) -> None:
        """Abort the group, and wait a while until nothing of it touches memory."""
        self.end_waits()
        assert self._aborted is not None
        until = Deadline(_ABORT_SECONDS)
        while not self._aborted.done() and not until.over:
            time.sleep(_LONGEST_PAUSE)
        buried, self._group = [self._group], None  # its end joins threads of the library's
        call(buried.clear, "burial of a device group")


class _Broadcast:
    """The host waits, not only a stream: a bucket is counted, hashed and handed on by the host."""

    def __init__(self, group: DeviceGroup, work: torch.distributed.Work, tensor: torch.Tensor, what: str) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # alive until it is through
        self._what = what

    def wait(self, deadline: Deadline) -> None:
        """See Work."""
        pause = _SHORTEST_PAUSE
        try:
            while not self._work.is_completed() and not self._group.ended:
                deadline.check(self._what)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            if not self._group.ended:
                self._work.wait()  # raises what is_completed took for an end
        except RuntimeError as error:
            raise PeerLostError(f"{self._what}: {_line(error)}") from error
        if self._group.ended:  # also where is_completed said so: an aborted kernel is
            raise PeerLostError(f"{self._what}: the group was ended after {deadline.elapsed:.1f} s")


def _from_rank_0() -> torch.distributed.BroadcastOptions:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = True  # on a stream of the group's own, so that the next bucket is filled meanwhile
    return options


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
