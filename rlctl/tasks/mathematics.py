"""The verifier of mathematical expressions, by the package math-verify. Importing this needs the package."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from rlctl.tasks.final_part import final_part
from rlctl.tasks.packages import need

_MATH = need("math_verify", "math-verify", "the verifier 'math'")
# It warns that its own deadline is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1.0 if the expression that the final part ends in, LaTeX or plain, equals the answer."""
    # The deadline of the reward ends what takes too long; the package's own needs signals.
    found = _MATH.parse(final_part(response), parsing_timeout=None)
    return float(_MATH.verify(_gold(answer), found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    """Return the readings of an answer. Text without ``$`` is tried as LaTeX, too."""
    readings: list[Any] = _MATH.parse(answer, parsing_timeout=None)
    return readings or _MATH.parse(f"${answer}$", parsing_timeout=None)
