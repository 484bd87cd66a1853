"""What differs between two runs' records of one step, bit for bit, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlctl.experience.records.reading import Bundle, Round
from rlctl.experience.rows import Row
from rlctl.ops.replay.history import History
from rlctl.ops.replay.parting import KeyDifference, Parting

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("generate", "prompt_ids"), ("generate", "response_ids"), ("generate", "rollout_logprobs"),
    ("generate", "versions"), ("generate", "turns"), ("generate", "observations"),
    ("reward", "reward"), ("old_log_probs", "old_logprobs"), ("ref_log_probs", "ref_logprobs"), ("values", "values"),
    ("advantages", "mask"), ("advantages", "importance"), ("advantages", "advantages"), ("advantages", "returns"),
    ("update_actor", "train_logprobs"),
)  # fmt: skip


def record_differences(this: History, other: History) -> Callable[[int], Iterator[Parting]]:
    """Return what yields the differences of a step's two records; none where one run has no record of it.

    What it returns raises RecordError for a record that is not whole.
    """

    def differences(step: int) -> Iterator[Parting]:
        mine, theirs = this.bundle(step), other.bundle(step)
        if mine is not None and theirs is not None:
            yield from bundle_differences(step, mine, theirs)

    return differences


def bundle_differences(step: int, mine: Bundle, theirs: Bundle) -> Iterator[Parting]:
    """Yield what differs."""
    if len(mine.rounds) != len(theirs.rounds):
        yield Parting(step, "generate", "local updates", len(mine.rounds), len(theirs.rounds))
        return
    for a, b in zip(mine.rounds, theirs.rounds, strict=True):
        keys, others = [tuple(row.key) for row in a.rows], [tuple(row.key) for row in b.rows]
        if keys != others:
            at = next((i for i, (x, y) in enumerate(zip(keys, others, strict=False)) if x != y), None)
            where = f"row {at}" if at is not None else "rows"
            yield Parting(step, "generate", "responses", len(keys), len(others), None, where)
            return
        yield from _columns(step, a, b)
        yield from _of_round(step, a, b)
    for name in ("params_sha256", "critic_sha256"):
        x, y = getattr(mine.manifest, name), getattr(theirs.manifest, name)
        if x and y and x != y:
            yield Parting(step, "parameters", name, x, y)


def _columns(step: int, a: Round, b: Round) -> Iterator[Parting]:
    for stage, name in _COLUMNS:
        if (found := _column(a.rows, b.rows, name)) is not None:
            row, gap = found
            yield Parting(step, stage, name, None, None, gap, f"prompt {row.key.ordinal}, sample {row.key.sample}")


def _column(mine: Sequence[Row], theirs: Sequence[Row], name: str) -> tuple[Row, float | None] | None:
    """Return the first row whose ``name`` differs in any bit, and the greatest difference of all rows."""
    first: Row | None = None
    worst: float | None = None
    for row, other in zip(mine, theirs, strict=True):
        a, b = getattr(row, name), getattr(other, name)
        if _same(a, b):
            continue
        first = first or row
        if (gap := _gap(a, b)) is not None:
            worst = max(worst or 0.0, gap)
    return None if first is None else (first, worst)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def _gap(a: Any, b: Any) -> float | None:
    if a is None or b is None or np.shape(a) != np.shape(b) or np.size(a) == 0:
        return None
    x, y = np.asarray(a), np.asarray(b)
    if not (np.issubdtype(x.dtype, np.floating) and np.issubdtype(y.dtype, np.floating)):
        return None
    gaps = np.abs(x.astype(np.float64) - y.astype(np.float64))
    finite = gaps[np.isfinite(gaps)]
    return float(finite.max()) if finite.size else None


def _of_round(step: int, a: Round, b: Round) -> Iterator[Parting]:
    for stage, name in (("reward", "task_rewards"), ("generate", "cut"), ("balance", "mini_batches"),
                        ("balance", "micro_batches")):  # fmt: skip
        if list(getattr(a, name)) != list(getattr(b, name)):
            yield Parting(step, stage, name)
    if not _same(a.scores, b.scores):
        yield Parting(step, "reward", "scores", None, None, _gap(a.scores, b.scores))
    for name in ("kl_coef", "kl_coef_after"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y and not (math.isnan(x) and math.isnan(y)):
            yield Parting(step, "update_actor", name, x, y, abs(x - y))


def environment_differences(this: History, other: History, steps: Sequence[int]) -> list[KeyDifference]:
    """Return what the machines and packages of two runs differ in, by the first of ``steps`` that both recorded."""
    for step in steps:
        mine, theirs = this.bundle(step), other.bundle(step)
        if mine is not None and theirs is not None:
            a, b = _flat(mine.manifest.fingerprint), _flat(theirs.manifest.fingerprint)
            return [KeyDifference(k, a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    return []


def _flat(document: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        return {prefix: document}
    found: dict[str, Any] = {}
    for name, value in document.items():
        found.update(_flat(value, f"{prefix}.{name}" if prefix else str(name)))
    return found
