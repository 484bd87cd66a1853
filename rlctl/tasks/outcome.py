"""What came of one call for a reward: a number, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

NOT_A_NUMBER, OUT_OF_RANGE = "not a number", "out of range"
LARGEST_REWARD = 1e15
"""Squares of rewards, and sums of many of them, must stay within float32."""


def unusable(failed: str) -> bool:
    """Whether a reward failed for the value that the function returned, as its code has it."""
    return failed.startswith((NOT_A_NUMBER, OUT_OF_RANGE))


class Outcome(msgspec.Struct, frozen=True):
    """A finite reward with further numbers, or ``failed``: why it counts as 0.

    Of a step: ``observation``, None when the conversation is done, and ``wrong``: why what it returned is no step.
    """

    reward: float = 0.0
    failed: str | None = None
    metrics: dict[str, float] = {}
    observation: str | None = None
    wrong: str | None = None


def outcome_of(call: Callable[[], object]) -> Outcome:
    """Run ``call`` and judge what it returns: a number, or a mapping with ``reward`` and further numbers."""
    try:
        value = call()
        if isinstance(value, Mapping):
            numbers = {str(name): _number(number) for name, number in value.items()}
            if "reward" not in numbers:
                raise _NotANumberError(f"a mapping without 'reward': {value!r}")
            return Outcome(_in_range(numbers.pop("reward")), None, numbers)
        return Outcome(_in_range(_number(value)))
    except _NotANumberError as error:
        return Outcome(failed=in_one_line(f"{NOT_A_NUMBER}: {error}"))
    except _OutOfRangeError as error:
        return Outcome(failed=f"{OUT_OF_RANGE}: {error}")
    except Exception as error:  # noqa: BLE001 - other people's code may raise anything, and the run goes on
        return Outcome(failed=in_one_line(f"raised: {type(error).__name__}: {error}"))


def in_one_line(text: str, most: int = 220) -> str:
    """Return other people's words as one line without control characters, cut to ``most`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


class _NotANumberError(Exception):
    pass


class _OutOfRangeError(Exception):
    pass


def _in_range(reward: float) -> float:
    if abs(reward) > LARGEST_REWARD:
        raise _OutOfRangeError(f"{reward:g}, beyond +-{LARGEST_REWARD:g}")
    return reward


def _number(value: object) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _NotANumberError(repr(value))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _NotANumberError(repr(value)) from error
    if not math.isfinite(number):
        raise _NotANumberError(repr(value))
    return number
