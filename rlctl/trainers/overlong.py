"""Responses that were cut at their longest length, by the policy that the configuration states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlctl.errors import RlctlError
from rlctl.experience.groups import PromptGroup, Response
from rlctl.experience.rows import Row, rows_of
from rlctl.schema.algorithm import Overlong


def counted(group: PromptGroup, policy: Overlong) -> list[Response]:
    """Return the responses that count in a group's baseline."""
    return [r for r in group.ordered if policy != "drop" or r.finish_reason != "length"]


def rows_by_policy(groups: Sequence[PromptGroup], policy: Overlong) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of a train batch, and how many responses were cut, masked and dropped.

    ``truncate`` trains a cut response as it is; ``mask`` trains none of its tokens but counts its reward in the
    baseline; ``drop`` leaves it out of both.

    Raises:
        MisalignedError: see ``rows_of``.
        RlctlError: every response was cut, so that nothing is left to train.
    """
    rows = rows_of(groups)
    cut = {r.key for group in groups for r in group.ordered if r.finish_reason == "length"}
    if cut and policy != "truncate" and len(cut) == len(rows):
        raise RlctlError(
            f"all {len(rows)} responses of the step were cut at rollout.max_new_tokens, and none is trained",
            where="algorithm.overlong_responses",
            fix="raise rollout.max_new_tokens, or set algorithm.overlong_responses=truncate",
        )
    metrics = {
        "truncated": len(cut) / len(rows),
        "overlong_masked": float(len(cut) if policy == "mask" else 0),
        "overlong_dropped": float(len(cut) if policy == "drop" else 0),
    }
    if policy == "drop":
        rows = [row for row in rows if row.key not in cut]
    if policy == "mask":
        for row in rows:
            if row.key in cut:
                row.mask = np.zeros(len(row.response_ids), np.bool_)
    return rows, metrics
