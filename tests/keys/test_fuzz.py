"""A few hundred damaged and forged checkpoints; ``python -m benchmarks.fuzz_keys`` runs ten thousand."""

from collections import Counter
from pathlib import Path

import pytest

from tests.keys.hostile_run import survives

BATCH, BATCHES = 100, 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_hostile_checkpoints_end_in_an_answer_or_a_readable_error(batch: int, tmp_path: Path) -> None:
    outcomes = Counter(survives(seed, tmp_path) for seed in range(batch * BATCH, (batch + 1) * BATCH))
    assert outcomes.total() == BATCH
    assert len(outcomes) > 2  # the damage reaches several layers, and some inputs stay valid
    assert outcomes["ok"] < BATCH * 0.7
