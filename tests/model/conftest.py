"""Random numbers that a failed test's output names."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    torch.manual_seed(value)
    random.seed(value)
    return value
