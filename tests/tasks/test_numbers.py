"""Numbers as people and models write them, and the verifier that compares them."""

import random
import time
from decimal import Decimal

import pytest

from rlctl.tasks.numbers import Number, equal, last_number
from rlctl.tasks.verifiers import numeric


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42.", "42"), ("1,000", "1000"), ("1,234,567.5 km", "1234567.5"), ("(1,2)", "2"), ("1,0000", "0"),
        ("5-3", "3"), ("x = -3", "-3"), ("\u22127", "-7"), ("(-4)", "-4"), ("2-(-3)", "-3"), ("x-3", "3"),
        ("- 3", "-3"),
        ("3/4", "0.75"), ("-3/4", "-0.75"), ("2 1/2", "2.5"), (r"\boxed{\frac{3}{4}}", "0.75"),
        (r"\dfrac{1}{2}", "0.5"),
        (r"-\frac{1}{2}", "-0.5"), ("1 / 8", "0.125"),
        ("$5k", "5000"), ("2.5 million", "2500000"), ("3 thousand people", "3000"), ("5kg", "5"), ("1e3", "1000"),
        ("#### 72", "72"), ("so 3 + 4 = 7", "7"), ("007", "7"), (".5", "0.5"),
    ],
)  # fmt: skip
def test_the_last_number_is_read(text: str, value: str) -> None:
    assert last_number(text) == Number(Decimal(value)), text


@pytest.mark.parametrize("text", ["", "three", "NaN", "inf", "-", "1/0", "0/0", "\u0663", "1e99999999999999999999"])
def test_what_is_no_finite_number(text: str) -> None:
    assert last_number(text) is None
    assert numeric("", text, text) == 0.0
    assert numeric("", text, "1") == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("50%", "50 %", 1), ("50%", "0.5", 1), ("50", "50%", 1), ("0.5", "50%", 1), ("50%", "0.5%", 0),
        ("50%", "5%", 0),
        ("12 percent", r"12\%", 1), ("1/3", "0.3333333", 1), ("1/3", "0.3333", 0), ("0", "0.0", 1), ("0", "1e-9", 0),
        ("1e999", "1e999", 1), ("1e999", "1e998", 0), ("1e-999", "2e-999", 0), ("0", "-0", 1),
        ("12 thousand", "12,000", 1), ("3", "-3", 0),
    ],
)  # fmt: skip
def test_equal_numbers_in_other_words_earn_the_reward(answer: str, response: str, reward: float) -> None:
    assert numeric("", response, answer) == reward


def test_the_tolerance_is_relative_and_zero_means_exact() -> None:
    big, next_to_it = "9007199254740993", "9007199254740992"
    assert numeric("", big, next_to_it) == 1.0
    assert numeric("", big, next_to_it, tolerance=0.0) == 0.0
    assert numeric("", "1/3", "2/6", tolerance=0.0) == 1.0
    assert numeric("", "101", "100", tolerance=0.01) == 1.0
    assert numeric("", "102", "100", tolerance=0.01) == 0.0


def test_random_numbers_are_read_back() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(300):
        number = source.uniform(-1, 1) * 10 ** source.randrange(-20, 20)
        for form in ("{:.12e}", "{:.25f}", "{:,.25f}"):
            found = last_number("is " + form.format(number) + "!")
            assert found is not None
            assert equal(found, Number(Decimal(form.format(number).replace(",", ""))), 0.0)


@pytest.mark.parametrize("unit", ["9", "9,", "1 ", "1/", ",999", "-", "1e", "$", "1 1/", r"\frac{1", ".1", " % "])
def test_long_responses_take_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * length
        start = time.process_time()
        numeric("", text, "1")
        return time.process_time() - start

    assert seconds(400_000 // len(unit)) < 3.0
