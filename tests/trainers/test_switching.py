"""The rule for lending: each reason by itself, and what it must never do whatever the numbers."""

import random
from dataclasses import replace

import pytest

from rlctl.trainers.switching import LendInputs, Measured, decide

PAYS = LendInputs(
    wanted=16, ready=4, under_way=200, slots=64, standalone=1, hybrids=1, rate=2.0, cost=1.0
)  # 12 groups at 2 a second: 6 s, of which 3 are saved


def test_it_lends_where_the_wait_saved_is_longer_than_the_switch():
    found = decide(PAYS)
    assert found.lend and found.gain == pytest.approx(3.0)
    assert not decide(replace(PAYS, cost=3.5)).lend


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hybrids": 0}, "nothing to lend"),
        ({"ready": 16}, "does not wait"),
        ({"ready": 99}, "does not wait"),
        ({"under_way": 64}, "decode all at once"),
    ],
)
def test_it_does_not_lend(change, why):
    found = decide(replace(PAYS, **change))
    assert not found.lend and why in found.why and found.gain == 0


def test_what_was_never_measured_is_tried_once():
    measured = Measured()
    assert decide(replace(PAYS, rate=measured.rate, cost=measured.cost)).lend
    measured.generated(8, 4.0)
    assert decide(replace(PAYS, rate=measured.rate, cost=measured.cost)).lend
    measured.lent(20.0)
    measured.taken_back(30.0)
    assert measured.rate == 2.0 and measured.cost == 50.0
    assert not decide(replace(PAYS, rate=measured.rate, cost=measured.cost)).lend


def test_newer_steps_count_more_and_empty_ones_not():
    measured = Measured()
    for groups in (4, 8, 0):
        measured.generated(groups, 2.0)
    assert measured.rate == pytest.approx(3.0)
    other = Measured()
    other.load(measured.state())
    assert other == measured


def test_more_to_gain_never_turns_a_yes_into_a_no():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(2000):
        inputs = LendInputs(
            wanted=rng.randint(1, 64), ready=rng.randint(0, 64), under_way=rng.randint(0, 400), slots=64,
            standalone=rng.randint(1, 4), hybrids=rng.randint(0, 4), rate=rng.choice([None, rng.uniform(0, 9)]),
            cost=rng.choice([None, rng.uniform(0, 9)]),
        )  # fmt: skip
        found = decide(inputs)
        assert found.gain >= 0
        if found.lend:
            assert inputs.hybrids and inputs.wanted > inputs.ready and inputs.under_way > inputs.slots
            assert decide(replace(inputs, wanted=inputs.wanted + 1)).lend
            if inputs.cost is not None:
                assert decide(replace(inputs, cost=inputs.cost / 2)).lend
        assert set(inputs.figures()) >= {"wanted", "ready", "under_way", "slots", "standalone", "hybrids"}
