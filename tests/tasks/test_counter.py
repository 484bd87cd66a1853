"""Counted random numbers: fixed for ever, well spread, permutations of everything."""

import random

import numpy as np
import pytest

from rlctl.tasks import counter
from rlctl.tasks.counter import draw, permutation, uniform


def test_the_numbers_are_these_and_stay_these() -> None:
    # A resumed run on another machine, or with another numpy, draws the same prompts.
    assert draw(0) == 12035550249420947055
    assert draw(1, 2, 3) == 7327429808974683132
    assert permutation(10, 7, 0).tolist() == [6, 0, 9, 3, 1, 8, 5, 7, 2, 4]


def test_the_mixing_is_that_of_splitmix64() -> None:
    assert counter._finish(counter._STEP) == 0xE220A8397B1DCDAF  # first output of the reference code, seed 0


def test_every_key_and_the_order_of_keys_matters() -> None:
    seen = {draw(), draw(0), draw(0, 0), draw(1, 0), draw(0, 1), draw(-1), draw(2**64 - 2), draw(2**63)}
    assert len(seen) == 8
    assert draw(-1) == draw(2**64 - 1)


def test_uniform_is_uniform() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    values = np.array([uniform(seed, i) for i in range(20000)])
    assert values.min() > 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 60  # 19 degrees of freedom: beyond 60 once in 4 million


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 5000])
def test_a_permutation_has_each_index_once_and_changes_with_the_key(size: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    order = permutation(size, seed, 0)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == permutation(size, seed, 0).tolist()
    if size > 100:
        assert order.tolist() != permutation(size, seed, 1).tolist()
        assert order.tolist() != permutation(size, seed + 1, 0).tolist()


def test_each_place_of_a_permutation_is_equally_likely() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    counts = np.zeros((5, 5))
    for epoch in range(4000):
        counts[np.arange(5), permutation(5, seed, epoch)] += 1
    assert np.abs(counts - 800).max() < 800 * 0.2  # 6 standard deviations
