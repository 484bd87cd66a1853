"""Twenty steps of the built-in task: four ranks that switch twice a step reach what one process does."""

from __future__ import annotations

import random

import pytest

from tests.hybrid.learning_on_ranks import in_one_process
from tests.hybrid.world import World

AT = "tests.hybrid.learning_on_ranks:"


@pytest.mark.slow
def test_the_reward_is_that_of_one_process(ranks: World) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    many = ranks.call(AT + "on_ranks", timeout=280.0, steps=20, seed=seed)
    assert all(rewards == many[0] for rewards in many)
    one = in_one_process(20, seed)
    print([f"{a:.3f} {b:.3f}" for a, b in zip(one, many[0], strict=True)])
    assert many[0][0] == one[0]  # the same weights and the same noise
    late = [sum(rewards[-5:]) / 5 for rewards in (one, many[0])]
    # Of 640 responses each: three standard errors of the difference, and what rounding sets apart in learning.
    assert abs(late[0] - late[1]) < 0.1
    assert min(late) > many[0][0] + 0.15
