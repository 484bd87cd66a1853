"""Numbers in the words of people and models, and when two of them are equal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal

TOLERANCE = 1e-6
"""Relative difference up to which two numbers are equal, unless the user says otherwise."""

_SCALES = {"k": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DIGITS = r"(?:[0-9]{1,3}+(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-+]\s?)?"  # the minus of a difference (5-3) is no sign
    r"[$€£]?"
    rf"(?:(?P<whole>{_DIGITS})[ ](?=[0-9]++/[0-9]))?"
    rf"(?P<number>{_DIGITS}(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?P<exponent>[eE][-+]?[0-9]++)?"
    r"(?:\s?/\s?(?P<divisor>[0-9]++(?:\.[0-9]++)?))?"
    r"(?P<scale>[kK](?!\w)|\s(?:thousand|million|billion|trillion)\b)?"
    r"(?P<percent>\s?\\?%|\s(?:percent|per cent)\b)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]++)\}\{([0-9]++)\}")
# Enough digits for any answer that is meant; nothing traps, so that what is too large becomes an infinity.
_ARITHMETIC = Context(prec=60, traps=[])


@dataclass(frozen=True)
class Number:
    """A finite number. ``percent``: it was followed by a percent sign, and ``value`` is what stood before that."""

    value: Decimal
    percent: bool = False


def last_number(text: str) -> Number | None:
    """Return the last number in ``text``, or None if there is none, or none that is finite.

    ``1,000`` is a thousand, as are ``1e3``, ``1k`` and ``1 thousand``; ``3/4``, ``2 1/2`` and ``\\frac{3}{4}`` are
    fractions; ``5-3`` ends in 3. The time is linear in the length of the text.
    """
    found = None
    for found in _NUMBER.finditer(_FRACTION.sub(r" \1/\2", text.replace("\u2212", "-"))):  # noqa: B007
        pass
    return None if found is None else _number(found)


def _number(found: re.Match[str]) -> Number | None:
    # With a context, an exponent beyond all bounds gives a NaN instead of an error.
    value = Decimal(found["number"].replace(",", "") + (found["exponent"] or ""), _ARITHMETIC)
    if found["divisor"]:
        value = _ARITHMETIC.divide(value, Decimal(found["divisor"]))
    if found["whole"]:
        value = _ARITHMETIC.add(Decimal(found["whole"].replace(",", "")), value)
    if found["scale"]:
        value = _ARITHMETIC.scaleb(value, Decimal(_SCALES[found["scale"].strip().lower()]))
    if found["sign"] and found["sign"].startswith("-"):
        value = value.copy_negate()
    return Number(value, bool(found["percent"])) if value.is_finite() else None


def equal(expected: Number, found: Number, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers differ by at most ``tolerance`` times the larger of them.

    Of a number with a percent sign and one without, the sign may be taken at its word (50% = 0.5) or as the unit that
    was asked for (50% = 50).
    """
    if expected.percent == found.percent:
        return _close(expected.value, found.value, tolerance)
    with_sign, without = (expected, found) if expected.percent else (found, expected)
    hundredth = _ARITHMETIC.scaleb(with_sign.value, Decimal(-2))
    return any(_close(value, without.value, tolerance) for value in (with_sign.value, hundredth))


def _close(a: Decimal, b: Decimal, tolerance: float) -> bool:
    largest = max(_ARITHMETIC.abs(a), _ARITHMETIC.abs(b))
    difference = _ARITHMETIC.abs(_ARITHMETIC.subtract(a, b))
    # Comparing with a NaN would raise; an overflow of the difference is no equality.
    return difference.is_finite() and difference <= _ARITHMETIC.multiply(Decimal(tolerance), largest)
