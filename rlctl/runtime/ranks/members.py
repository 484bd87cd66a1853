"""The trainer's ranks as one side of a weight sync."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from rlctl.runtime.ranks.messages import Order, Report
from rlctl.runtime.ranks.supervisor import TrainerRanks
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions
from rlctl.sync.errors import MemberLostError
from rlctl.sync.member_process import GRACE


@dataclass(frozen=True)
class RankSeat:
    """One rank, as a Group lists it; see ``protocols.Seat``."""

    name: str
    replica: str = ""
    holds_weights: bool = False


class RankMembers:
    """A Group: what ranks send comes from the model that they hold, in the processes that train it.

    Commands wait while a rank computes, and the other way round. A rank that dies in one ends the sync; what the
    trainer asks next says which it was.
    """

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._numbers = [0] * ranks.size
        self.members = [RankSeat(f"trainer rank {rank}") for rank in range(ranks.size)]

    def open(self, backend: str, options: EngineOptions, deadline: Deadline) -> None:
        """Make the checkpoint engine of every rank. Raises what went wrong in one."""
        arguments = {
            rank: {"backend": backend, "role": "trainer", "rank": rank, "world": len(self.members)}
            for rank in range(len(self.members))
        }
        told = asdict(options)
        started = self.start("open", {rank: {**mine, "options": told} for rank, mine in arguments.items()}, deadline)
        for future in started.values():
            future.result()

    def start(
        self, command: str, arguments: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, Future[Any]]:
        """See Group. A rank is never killed for a sync: the model is there."""
        return {
            rank: call(lambda r=rank, a=mine: self._ask(r, command, a, deadline), f"{command} rank {rank}")  # type: ignore[misc]
            for rank, mine in arguments.items()
        }

    def cancel(self, places: Iterable[int]) -> None:
        """See Group."""
        for rank in places:
            self._ranks.child(rank).signal(signal.SIGUSR2)

    def _ask(self, rank: int, command: str, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
        """Return a rank's answer. Raises its own error, DeadlineError, or MemberLostError when it has ended: what the
        trainer asks next says how."""
        what, lock = f"trainer rank {rank}: {command}", self._ranks.talking(rank)
        if not lock.acquire(timeout=deadline.remaining):
            raise deadline.error(f"{what}: still busy with something else")
        try:
            self._numbers[rank] = number = self._numbers[rank] + 1
            channel = self._ranks.child(rank).channel
            order = Order("sync", {"number": number, "command": command, "arguments": dict(arguments)})
            channel.send(order, max(deadline.remaining, GRACE))
            answer = channel.receive(deadline.remaining + GRACE, Report)
            while answer.kind != "answer" or answer.number != number:  # late, to an earlier command
                answer = channel.receive(deadline.remaining + GRACE, Report)
        except TimeoutError as error:
            raise deadline.error(what) from error
        except (EOFError, OSError) as error:
            self._ranks.ended.add(rank)
            raise MemberLostError(f"{what}: trainer rank {rank} has ended") from error
        finally:
            lock.release()
        if answer.error is not None:
            raise answer.error.error()
        return answer.result
