"""Making the next pieces while the last one is written, on no more threads than that needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

DEPTH = 2


def ahead(items: Iterator[T], pool: ThreadPoolExecutor) -> Iterator[T]:
    """Yield ``items``, made in the one thread of ``pool`` up to ``DEPTH`` in advance.

    Items that share memory in turn need ``DEPTH + 1`` of it. An error of the iterator is raised here, in its place. One
    thread for many iterators is much faster than one for each: a new thread's memory is all page faults.
    """
    end = object()
    coming = deque(pool.submit(next, items, end) for _ in range(DEPTH))
    while True:
        item = coming.popleft().result()
        if item is end:
            return
        coming.append(pool.submit(next, items, end))
        yield item  # type: ignore[misc]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread for a while.

    Work on blocks of cache size gains little from more, and on a busy machine threads that wait for each other cost
    many times what they save.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
