"""Who holds everybody up: each rank says in the group's store what it is at, and shows that it is alive while it waits.

A rank that waits may itself wait for another, so what stopped a switch is not always the rank that one waits for. Ranks
that wait beat; the one that neither beats, nor goes on, nor has failed, is the one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

# A rank that waits says so this often, and is looked at twice this far apart.
BEAT = 0.12
LOOK = 0.4
# Longest time to ask a store whose host may be the rank that is dead.
PATIENCE = 0.8

State = Literal["busy", "waits", "failed", "done"]
_numbers = itertools.count()


class Status(NamedTuple):
    """What a rank last said: number of its switch, phase, state, and a count that grows while it waits."""

    switch: int
    phase: str
    state: str
    beat: int


class Watch:
    """One rank's word on what it does, and its look at the others.

    Args:
        group: the ranks; None: this process alone.
        rank, size: of this rank in it.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size
        self._switch, self._phase, self._state = 0, "start", "done"
        self._beats = 0
        self._lock = threading.Lock()
        self._store: Store | None = None
        # All ranks make the same watches in the same order.
        prefix = f"rlctl/reshard/{next(_numbers)}/"
        if group is not None and size > 1:
            store = dist.distributed_c10d._get_process_group_store(group)  # noqa: SLF001 - no public name for it
            self._store = PrefixStore(prefix, store)

    @contextmanager
    def switch(self) -> Iterator[None]:
        """Say that a switch is under way, and how it ended."""
        self._say(switch=self._switch + 1, state="busy")
        stop = threading.Event()
        beating = threading.Thread(target=self._beat, args=(stop,), name="rlctl-reshard-beat", daemon=True)
        beating.start()
        try:
            yield
        except BaseException:
            self._say(state="failed")
            raise
        else:
            self._say(state="done")
        finally:
            stop.set()

    def enter(self, phase: str, *, waits: bool = False) -> None:
        """Say which phase begins, and whether others are waited for in it."""
        self._say(phase=phase, state="waits" if waits else "busy")

    def culprits(self, waited: Collection[int]) -> dict[int, str]:
        """Return the ranks that hold this one up, and the phase each is in.

        Args:
            waited: ranks that this one waits for, or lost the connection to.
        """
        self._say(state="failed")
        found: list[dict[int, Status]] = []
        asking = threading.Thread(target=self._look_twice, args=(found,), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        if len(found) < 2:  # the store's host is dead or stuck
            return dict.fromkeys(waited, self._phase)
        first, second = found
        held = {rank: _held(self._switch, first.get(rank), second.get(rank)) for rank in range(self._size)}
        stuck = {rank: phase for rank, phase in held.items() if phase is not None and rank != self.rank}
        return {rank: stuck[rank] for rank in waited if rank in stuck} or stuck or dict.fromkeys(waited, self._phase)

    def _look_twice(self, found: list[dict[int, Status]]) -> None:
        assert self._store is not None
        for pause in (LOOK, 0.0):
            try:
                found.append({rank: read for rank in range(self._size) if (read := self._read(self._store, rank))})
            except RuntimeError:  # its host is gone: whoever asks sees that too few looks were had
                return
            time.sleep(pause)

    @staticmethod
    def _read(store: Store, rank: int) -> Status | None:
        if not store.check([str(rank)]):
            return None
        switch, state, beat, phase = store.get(str(rank)).decode().split(" ", 3)
        return Status(int(switch), phase, state, int(beat))

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT):
            with self._lock:
                if self._state == "waits" and not stop.is_set():
                    self._beats += 1
                    self._write()

    def _say(self, *, switch: int | None = None, phase: str | None = None, state: State) -> None:
        with self._lock:
            self._switch = self._switch if switch is None else switch
            self._phase = self._phase if phase is None else phase
            self._state = state
            self._write()

    def _write(self) -> None:
        if self._store is None:
            return
        try:
            self._store.set(str(self.rank), f"{self._switch} {self._state} {self._beats} {self._phase}")
        except RuntimeError:  # its host is gone: the switch itself will tell, and there is nobody left to hear this
            self._store = None


def _held(switch: int, first: Status | None, second: Status | None) -> str | None:
    """Return the phase that a rank is stuck in during ``switch``, or None when it is alive or done with it."""
    if second is None or second.switch < switch:
        return "before the switch"
    ended = second.state in ("failed", "done") or second.switch > switch
    return None if ended or second != first else second.phase
