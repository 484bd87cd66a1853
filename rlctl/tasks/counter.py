"""Numbers drawn by counting instead of by state: a hash of (key, key, ...) that is the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MUL_A = 0xBF58476D1CE4E5B9
_MUL_B = 0x94D049BB133111EB


def _finish(value: int) -> int:
    """Output function of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit numbers."""
    value = ((value ^ (value >> 30)) * _MUL_A) & _MASK
    value = ((value ^ (value >> 27)) * _MUL_B) & _MASK
    return value ^ (value >> 31)


def draw(*keys: int) -> int:
    """Return 64 well-mixed bits that depend on every key and on their order. Negative keys are taken modulo 2^64."""
    state = 0
    for key in keys:
        state = _finish((state + _STEP + _finish((key & _MASK) ^ _STEP)) & _MASK)
    return state


def uniform(*keys: int) -> float:
    """Return a number in the open interval (0, 1) for the keys."""
    return ((draw(*keys) >> 12) + 0.5) / (1 << 52)


def permutation(size: int, *keys: int) -> npt.NDArray[np.int64]:
    """Return the order of ``0 .. size-1`` for the keys, [size]: equal keys give equal orders, for ever."""
    state = np.uint64(draw(*keys))
    value: npt.NDArray[Any] = np.arange(size, dtype=np.uint64) * np.uint64(_STEP) + state
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MUL_A)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MUL_B)
    # The mapping from index to value is a bijection, so no two are equal and the order is unique.
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable").astype(np.int64)
