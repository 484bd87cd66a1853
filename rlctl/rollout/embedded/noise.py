"""Sampling noise by counter: one uniform per token, a function of who the token is and of nothing else.

SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): a stream's n-th output
is a mix of its key plus n times a constant, so any token's noise is found without the ones before it. A request's key
is the same mix chained over (run seed, ordinal, sample, turn).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlctl.experience.segments import RequestKey

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_STEP_U64 = np.uint64(_STEP)
_MIX_A_INT = 0xBF58476D1CE4E5B9
_MIX_B_INT = 0x94D049BB133111EB
_MIX_A = np.uint64(_MIX_A_INT)
_MIX_B = np.uint64(_MIX_B_INT)


def stream_key(seed: int, key: RequestKey) -> int:
    """Return the 64-bit key of a request's noise."""
    state = 0
    for field in (seed, key.ordinal, key.sample, key.turn):
        # The mix of ``_mix`` in whole numbers of Python: for one number that is faster than an array.
        z = (state + _STEP * ((field + 1) & _MASK)) & _MASK
        z = ((z ^ (z >> 30)) * _MIX_A_INT) & _MASK
        z = ((z ^ (z >> 27)) * _MIX_B_INT) & _MASK
        state = z ^ (z >> 31)
    return state


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return one uniform in [0, 1) per token.

    Args:
        keys: [n] stream keys.
        positions: [n] index of the token within its response, from 0.

    Returns:
        [n] multiples of 2**-24, exact in float32.
    """
    mixed = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP_U64)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
