"""Where two runs part, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STAGES = ("generate", "reward", "balance", "old_log_probs", "ref_log_probs", "values", "advantages", "update_critic",
          "update_actor", "parameters")  # fmt: skip


@dataclass(frozen=True)
class KeyDifference:
    """A key that two configurations give other values."""

    key: str
    this: Any
    other: Any


@dataclass(frozen=True)
class Parting:
    """The first step in which two runs are not the same.

    Attributes:
        step: its number; steps before it are equal.
        stage: of it, or ``absent`` where one run does not have it.
        tensor: column, figure or what else differs.
        this, other: of the two runs, where there is one value.
        max_abs: greatest absolute difference; None where there is no number to it.
        where: which prompt and sample, where it is one.
    """

    step: int
    stage: str
    tensor: str
    this: Any = None
    other: Any = None
    max_abs: float | None = None
    where: str = ""
