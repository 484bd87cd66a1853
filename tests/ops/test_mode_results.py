"""Figures of a mode over a whole run."""

import pytest

from rlctl.ops.mode_results import mode_results

STEP = {
    "samples": 8.0, "seconds": 2.0, "staleness": 1.0, "staleness_max": 3.0, "staleness_tokens": 0.5,
    "bubble_trainer": 0.5, "bubble_rollout": 0.25, "syncs": 1.0, "sync_seconds": 0.5, "sync_stall_seconds": 0.25,
    "trained_tokens": 100.0, "logprob_gap": 0.01, "logprob_gap_max": 0.2,
}  # fmt: skip


def test_steps_count_by_their_size():
    short = STEP | {
        "samples": 24.0, "seconds": 6.0, "staleness": 3.0, "bubble_trainer": 0.1, "trained_tokens": 300.0,
        "logprob_gap": 0.05, "logprob_gap_max": 0.1,
    }  # fmt: skip
    found = mode_results([STEP, short])
    assert found["staleness"] == {"mean": 2.5, "max": 3.0, "tokens": 0.5}
    assert found["bubble"] == {"trainer": pytest.approx(0.2), "rollout": 0.25}
    assert found["sync"] == {"count": 2, "seconds": 1.0, "stall_seconds": 0.5}
    assert found["logprob_gap"] == {"mean": pytest.approx(0.04), "max": 0.2}


def test_steps_of_another_release_and_no_steps_at_all():
    empty = {
        "staleness": {"mean": None, "max": None, "tokens": None},
        "bubble": {"trainer": None, "rollout": None},
        "sync": {"count": 0, "seconds": 0, "stall_seconds": 0},
        "logprob_gap": {"mean": None, "max": None},
    }
    assert mode_results([]) == empty
    assert mode_results([{"reward": 0.5, "seconds": 1.0}]) == empty
