"""Calls on many replicas at once, each in a thread of its own: one that hangs is fenced and holds up nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from rlctl.sync.fencing import ReplicaRecord
from rlctl.sync.waiting import gather


class ReplicaCalls:
    """Remembers calls that have not returned, of this sync or an earlier one."""

    def __init__(self) -> None:
        self._hanging: dict[str, Future[None]] = {}

    def on_all(
        self,
        records: Iterable[ReplicaRecord],
        what: str,
        action: Callable[[ReplicaRecord], None],
        deadline: Deadline,
    ) -> None:
        """Run ``action`` for each record; one that fails, or is not done by the deadline, is ``broken``."""
        futures = {r.name: self._start(r, what, action) for r in records}
        by_name = {r.name: r for r in records}
        answers = gather(futures, deadline, what)
        for name, error in answers.errors.items():
            by_name[name].fail(f"{what}: {error.message}")
            by_name[name].broken = True
        for name, future in futures.items():
            if not future.done():
                self._hanging[name] = future

    def _start(self, record: ReplicaRecord, what: str, action: Callable[[ReplicaRecord], None]) -> Future[None]:
        hanging = self._hanging.get(record.name)
        if hanging is not None and not hanging.done():
            refused: Future[None] = Future()
            refused.set_exception(DeadlineError("an earlier call has not returned yet"))
            return refused
        return call(lambda: action(record), f"{what} {record.name}")
