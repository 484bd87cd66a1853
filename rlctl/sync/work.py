"""Things under way: what a backend returns when it has begun to send or receive a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar, runtime_checkable

from rlctl.sync.deadline import Deadline

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """Something under way."""

    def wait(self, deadline: Deadline) -> T_co:
        """Return its result. Raises what went wrong, DeadlineError when it was not done in time."""


@runtime_checkable
class Sorted(Protocol):
    """A work that knows which of several of its kind to wait for."""

    def first_of(self, works: Sequence[object]) -> int:
        """Return the number of the one that is done first, or need not be waited for long; it is among them."""


class Done(Generic[T]):
    """What was done at once."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, deadline: Deadline) -> T:
        """See Work."""
        return self._result


def first_done(works: Sequence[Work[T]], deadline: Deadline) -> int:
    """Return the number of one of several works, each Done or Awaited, or all Sorted, that is done; 0 when none is in
    time."""
    if len(works) == 1:
        return 0
    if isinstance(works[0], Sorted):
        return works[0].first_of(works)
    futures: dict[Future[T], int] = {}
    for number, work in enumerate(works):
        if isinstance(work, Done):
            return number
        assert isinstance(work, Awaited), "works that are waited for together are Done or Awaited"
        futures[work.future] = number
    done, _ = wait(futures, None if deadline.seconds == float("inf") else deadline.remaining, FIRST_COMPLETED)
    return min((futures[future] for future in done), default=0)


class Awaited(Generic[T]):
    """What ``future`` stands for. ``what`` names the phase and the peer for the error of a deadline."""

    def __init__(self, future: Future[T], what: str) -> None:
        self.future = future
        self._what = what

    def wait(self, deadline: Deadline) -> T:
        """See Work."""
        try:
            return self.future.result(None if deadline.seconds == float("inf") else deadline.remaining)
        except TimeoutError as error:
            if self.future.done():
                raise
            raise deadline.error(self._what) from error


class InThread(Awaited[T]):
    """A call in a thread of ``pool``."""

    def __init__(self, pool: ThreadPoolExecutor, call: Callable[[], T], what: str) -> None:
        super().__init__(pool.submit(call), what)
