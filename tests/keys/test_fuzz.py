"""A few hundred damaged and forged checkpoints; ``python -m benchmarks.fuzz_keys`` runs ten thousand."""

import os
import pickle
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.keys.hostile_run import TooSlowError, deadline, survives, watched

BATCH, BATCHES = 60, 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_hostile_checkpoints_end_in_an_answer_or_a_readable_error(batch: int, tmp_path: Path) -> None:
    outcomes = Counter(survives(seed, tmp_path) for seed in range(batch * BATCH, (batch + 1) * BATCH))
    assert outcomes.total() == BATCH
    fine = sum(count for outcome, count in outcomes.items() if outcome.endswith(" ok"))
    assert BATCH * 0.02 < fine < BATCH * 0.6  # some damage goes unnoticed by right, most does not
    assert len(outcomes) > 10  # and it reaches many layers


def test_the_watch_sees_what_must_not_happen() -> None:
    with watched() as events:
        os.system("true")  # noqa: S605
        pickle.loads(pickle.dumps(Path))  # noqa: S301
        exec("x = 1")  # noqa: S102
    assert [event.split()[0] for event in events] == ["os.system", "pickle.find_class", "exec"]
    with pytest.raises(TooSlowError), deadline(0.05):
        time.sleep(5)
