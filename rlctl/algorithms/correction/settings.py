"""The settings of a rollout correction, parsed and checked. No torch here: a dry run reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlctl.errors import UsageError

SECTION = "algorithm.rollout_correction"
TOKEN_OPTIONS = ("token_k1", "token_k2", "token_k3")
SEQUENCE_OPTIONS = (
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
OPTIONS = (*TOKEN_OPTIONS, *SEQUENCE_OPTIONS)

WeightLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class Weighting:
    """Importance weights pi_train / pi_rollout.

    Attributes:
        level: of each token, or of the whole sequence (the product of its tokens' ratios) on each of its tokens.
        upper: weights above are cut to it (truncation), or set to 0 when ``lower`` is given (IcePop).
        lower: with it, weights outside lower .. upper are 0; None truncates.
        batch_normalize: divide by the mean weight of the batch.
    """

    level: WeightLevel
    upper: float
    lower: float | None = None
    batch_normalize: bool = False


@dataclass(frozen=True)
class Rejection:
    """One criterion that a token, or a sequence, must meet to be trained.

    Attributes:
        option: entry of ``OPTIONS``.
        low, high: bounds of the statistic, inclusive; for k1 in log space, on pi_rollout / pi_train.
    """

    option: str
    low: float
    high: float

    @property
    def level(self) -> str:
        """``token`` or ``seq``."""
        return self.option.partition("_")[0]


@dataclass(frozen=True)
class Correction:
    """What is done about the gap between rollout and trainer; empty: it is measured and nothing else."""

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()

    @property
    def active(self) -> bool:
        """Whether it changes the training."""
        return self.weighting is not None or bool(self.rejections)


def parse_correction(
    rollout_is: str | None,
    rollout_is_threshold: str | float,
    batch_normalize: bool,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> Correction:
    """Return the correction that the keys of ``algorithm.rollout_correction`` describe.

    Args:
        rollout_is: "token", "sequence" or None.
        rollout_is_threshold: a number C (truncation) or "lo_hi" (IcePop).
        batch_normalize: see ``Weighting``.
        rollout_rs: comma list of ``OPTIONS``, all of which must hold, or None.
        rollout_rs_threshold: one threshold for all options, or a comma list with one for each. For k1 "lo_hi" bounds
            on pi_rollout / pi_train, or x for 1/x .. x; for k2 and k3 one upper bound.

    Raises:
        UsageError: anything else.
    """
    weighting = None
    if rollout_is is not None:
        if rollout_is not in ("token", "sequence"):
            raise _fault("rollout_is", f"unknown level {rollout_is!r}", "token or sequence")
        lower, upper = _bounds("rollout_is_threshold", rollout_is_threshold)
        weighting = Weighting("token" if rollout_is == "token" else "sequence", upper, lower, batch_normalize)
    elif batch_normalize:
        raise _fault("rollout_is_batch_normalize", "there are no weights to normalise", "set rollout_is too")
    return Correction(weighting, _rejections(rollout_rs, rollout_rs_threshold))


def _rejections(options: str | None, thresholds: str | float | None) -> tuple[Rejection, ...]:
    if options is None:
        if thresholds is not None:
            raise _fault("rollout_rs_threshold", "a threshold without rollout_rs rejects nothing", "set rollout_rs too")
        return ()
    names = [name.strip() for name in options.split(",")]
    for name in names:
        if name not in OPTIONS:
            raise _fault("rollout_rs", f"unknown option {name!r}", f"known: {', '.join(OPTIONS)}")
    if len(set(names)) < len(names):
        raise _fault("rollout_rs", f"an option stands twice in {options!r}", "keep it once")
    if thresholds is None or isinstance(thresholds, bool):
        raise _fault("rollout_rs_threshold", f"{options} needs a threshold, got {thresholds}", "such as 0.999_1.001")
    given = [part.strip() for part in str(thresholds).split(",")]
    if len(given) not in (1, len(names)):
        raise _fault(
            "rollout_rs_threshold", f"{len(given)} thresholds for {len(names)} options", "give one, or one for each"
        )
    given = given * len(names) if len(given) == 1 else given
    return tuple(_rejection(name, threshold) for name, threshold in zip(names, given, strict=True))


def _rejection(option: str, threshold: str) -> Rejection:
    key = "rollout_rs_threshold"
    lower, upper = _bounds(key, threshold)
    if not option.endswith("k1"):
        if lower is not None:
            raise _fault(key, f"{option} takes one upper bound, got {threshold!r}", "write one number")
        return Rejection(option, -math.inf, upper)
    if lower is None:
        if upper < 1:
            raise _fault(key, f"{option}: {upper:g} alone means 1/{upper:g} .. {upper:g}, which is empty", "1 or more")
        lower = 1.0 / upper
    return Rejection(option, math.log(lower), math.log(upper))


def _bounds(key: str, text: str | float) -> tuple[float | None, float]:
    """Return (lower or None, upper) of ``C`` or ``lo_hi``, both positive and in order."""
    if isinstance(text, bool):
        raise _fault(key, f"a threshold is a number, got {text}", "a number, or lo_hi")
    parts = str(text).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise _fault(key, f"{text!r} is no threshold", "write a positive number such as 2.0, or lo_hi such as 0.5_5.0")
    if len(numbers) == 1:
        return None, numbers[0]
    if numbers[0] > numbers[1]:
        raise _fault(key, f"{text!r}: the lower bound is above the upper one", "write the smaller first")
    return numbers[0], numbers[1]


def _fault(key: str, message: str, fix: str) -> UsageError:
    return UsageError(message, where=f"{SECTION}.{key}", fix=fix)
