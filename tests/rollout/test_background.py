"""Generating in a thread of its own while another trains: the bound holds, nothing is lost, errors end the run."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.errors import RlctlError
from rlctl.experience.admission import Admission
from rlctl.experience.events import Dispatched, Selected
from tests.rollout.background import Side, sleeps, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize(("staleness", "warmup", "rounds"), [(0, 0.0, 1), (1, 1.0, 2), (3, 1.5, 2)])
def test_a_trainer_and_a_pump_side_by_side(model: Any, staleness: int, warmup: float, rounds: int) -> None:
    side, nap = Side(model, Admission("pacing", 4, staleness, warmup)), sleeps(3, 0.02)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    try:
        for step in range(1, 7):
            for _ in range(rounds):
                groups = side.take(step, 4 // rounds)
                assert max(step - 1 - group.oldest_version for group in groups) <= staleness
                nap()
            side.sync(step)
    finally:
        side.rollouter.stop()
    trained = [ordinal for event in side.of(Selected) for ordinal in event.ordinals]
    assert len(trained) == len(set(trained)) == 24
    assert max(age for event in side.of(Selected) for age in event.ages) <= staleness
    dispatched = side.of(Dispatched)
    assert [event.ordinal for event in dispatched] == list(range(len(dispatched)))
    for event in dispatched:
        assert event.ordinal < (event.version + 1 + min(staleness, warmup)) * 4


def test_the_end_of_the_data_is_a_shorter_batch(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 1, 1.0), size=10)
    side.rollouter.update_param_version(0)
    side.rollouter.start()
    sizes = []
    for step in range(1, 5):
        sizes.append(len(side.take(step, 4)))
        side.sync(step)
    side.rollouter.stop()
    assert sizes == [4, 4, 2, 0]
    assert sorted(o for event in side.of(Selected) for o in event.ordinals) == list(range(10))


def test_an_error_of_the_pump_is_raised_at_once_where_somebody_waits(model: Any) -> None:
    side = Side(model, Admission("pacing", 4, 0))
    side.rollouter.update_param_version(0)
    side.engine.sleep(2)
    side.rollouter.start()
    with pytest.raises(RlctlError, match="asleep"):
        side.take(1, 4)
    with pytest.raises(RlctlError, match="asleep"):
        side.rollouter.held()
    with pytest.raises(RlctlError, match="asleep"):
        side.rollouter.stop()
    side.rollouter.stop()
