"""What is kept of a long run: every step of the window can be reached from a checkpoint, and no more is kept."""

import random

import pytest

from rlctl.errors import UsageError
from rlctl.experience.records.bands import Band, Bands, parse_bands
from rlctl.experience.records.manifest import Pin
from rlctl.experience.records.window import Window, discarded


def simulate(window: Window, steps: int, keep: int, pins: dict[int, str] | None = None):
    """Go through a run; yield (step, records, checkpoints) after each step."""
    records: list[int] = []
    checkpoints = [0]
    kept: list[Pin] = []
    for step in range(1, steps + 1):
        records.append(step)
        if pins and step in pins:
            kept = [*kept, Pin(step, ["odd"], max(c for c in checkpoints if c < step))][-3:]
        gone = discarded(records, window.first(step, checkpoints), kept)
        records = [r for r in records if r not in gone]
        if window.checkpoint_every and step % window.checkpoint_every == 0:
            checkpoints.append(step)
            needed = {*window.needed(step, checkpoints), *(pin.checkpoint for pin in kept)}
            checkpoints = [c for c in checkpoints if c in needed or c in checkpoints[-keep:]]
        yield step, list(records), list(checkpoints), list(kept)


def test_every_step_of_the_window_is_reached_and_the_rest_is_gone():
    rng = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    for _ in range(40):
        window = Window(rng.randint(1, 40), rng.randint(1, 25))
        keep = rng.randint(1, 3)
        for step, records, checkpoints, _ in simulate(window, 200, keep):
            assert len(records) <= window.most, (window, step)
            assert set(range(max(1, step - window.steps + 1), step + 1)) <= set(records)
            for wanted in range(max(1, step - window.steps + 1), step + 1):
                begin = max((c for c in checkpoints if c < wanted), default=None)
                assert begin is not None, (window, step, wanted, checkpoints)
                assert set(range(begin + 1, wanted + 1)) <= set(records), (window, step, wanted, checkpoints)
            assert len(checkpoints) <= keep + 3 + window.most // max(window.steps // 2, 1)


def test_a_run_without_checkpoints_keeps_its_window_of_records():
    for step, records, left, _ in simulate(Window(10, 0), 100, 2):
        assert len(records) <= Window(10, 0).most and records[-1] == step and left == [0]
    assert len(records) == 10 and left == [0]


def test_no_window_keeps_all_and_the_checkpoint_that_it_begins_with():
    for step, records, checkpoints, _ in simulate(Window(0, 7), 60, 2):
        assert records == list(range(1, step + 1)) and checkpoints[0] == 0 and len(checkpoints) <= 3


def test_a_pinned_step_keeps_its_way_from_the_checkpoint_before_it():
    window = Window(6, 5)
    for step, records, checkpoints, pins in simulate(window, 100, 1, {12: "", 31: "", 32: "", 77: ""}):
        for pin in pins:
            assert pin.checkpoint in checkpoints
            assert set(range(pin.checkpoint + 1, pin.step + 1)) <= set(records)
        if step > 95:
            assert [pin.step for pin in pins] == [31, 32, 77] and 11 not in records


def test_bands_find_what_is_odd_and_leave_the_rest():
    bands = Bands(parse_bands(["reward=0.1..", "loss=..2", "kl = -1 .. 1.5", "grad_norm~6"]))
    rng = random.Random(1)
    for _ in range(20):
        figures = {"reward": 0.5, "loss": 1.0, "grad_norm": 1 + 0.1 * rng.random(), "skipped_updates": 0.0}
        assert bands.add(figures) == []
    assert bands.add({**figures, "reward": 0.05}) == ["reward 0.05 is outside 0.1 to inf"]
    assert bands.add({**figures, "loss": 3.0, "kl": -2.0}) == [
        "loss 3 is outside -inf to 2",
        "kl -2 is outside -1 to 1.5",
    ]
    (odd,) = bands.add({**figures, "grad_norm": 9.0})
    assert odd.startswith("grad_norm 9 is ") and "spreads from 1.0" in odd
    assert bands.add({**figures, "loss": float("nan")}) == ["loss is nan"]
    assert bands.add({**figures, "skipped_updates": 1.0}) == ["1 updates were skipped"]


def test_a_spread_needs_steps_and_a_figure_that_moved():
    bands = Bands([Band("loss", times=3.0)])
    assert [bands.add({"loss": value}) for value in (0.0, 1e9, 0.0)] == [[], [], []]
    still = Bands([Band("loss", times=3.0)])
    assert [still.add({"loss": value}) for value in [0.5] * 20 + [0.6]] == [[]] * 21


@pytest.mark.parametrize(
    "entry", ["loss", "loss=1", "loss=2..1", "loss~0", "loss~x", "=1..2", "loss=a..b", "loss~inf", "loss=nan.."]
)
def test_what_is_no_band_is_refused(entry):
    with pytest.raises(UsageError, match="is no band of a figure"):
        parse_bands([entry])
