"""How far lengths and batches can grow before a run no longer fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlctl.memory.advice import changed
from rlctl.memory.workload import Workload

KEYS = ("trainer.micro_batch_tokens", "rollout.max_new_tokens", "rollout.max_slots")
_MOST = 1 << 24


@dataclass(frozen=True)
class Largest:
    """The largest value of one key, the others as they are, with which the run fits.

    Attributes:
        key: dotted.
        now: its value.
        most: the largest that fits; 0 when none does, and -1 when memory does not bound it.
    """

    key: str
    now: int
    most: int


def largest(work: Workload, fits: Callable[[Workload], bool]) -> Iterator[Largest]:
    """Yield the largest value of each key in ``KEYS``; ``fits`` must not turn true again as a value grows
    beyond the one that the run has."""
    for key in KEYS:
        section, _, name = key.partition(".")
        now = int(getattr(getattr(work.config, section), name))
        yield Largest(key, now, _search(work, key, fits, now))


def with_value(work: Workload, key: str, value: int) -> Workload:
    """Return ``work`` with ``value`` under ``key``."""
    return replace(work, config=changed(work.config, key, value))


def _search(work: Workload, key: str, fits: Callable[[Workload], bool], now: int) -> int:
    def good(value: int) -> bool:
        return fits(with_value(work, key, value))

    if good(now):
        low, high = now, 2 * now
    elif good(1):
        low, high = 1, now
    else:
        return 0
    while good(high):
        low, high = high, high * 2
        if high > _MOST:
            return -1
    while high - low > max(low // 256, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
