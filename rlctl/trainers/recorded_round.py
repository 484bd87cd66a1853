"""A local update as its record has it."""

from __future__ import annotations

import numpy as np

from rlctl.experience.figures import figures_out
from rlctl.experience.groups import Response
from rlctl.experience.records.columns import RoundRows, spans_of
from rlctl.experience.records.manifest import GroupInfo, RoundInfo
from rlctl.trainers.step import StepState


def recorded_round(step: StepState, kl_coef: float, kl_coef_after: float) -> tuple[RoundRows, RoundInfo]:
    """Return the rows and all else of a local update that has ended, or of what there is of one that failed.

    Args:
        step: as its stages left it; its rows change no more.
        kl_coef, kl_coef_after: weight of the KL before and after the update.
    """
    responses = {response.key: response for group in step.groups for response in group.ordered}
    rows, place = step.rows, {row.key: index for index, row in enumerate(step.rows)}
    told = [responses[row.key] for row in rows]
    scores = [row.score for row in rows]
    kept = RoundRows(
        rows=rows,
        task_rewards=[_task_reward(response) for response in told],
        cut=[response.finish_reason == "length" for response in told],
        segments=[spans_of(response.segments) for response in told],
        scores=None if None in scores else np.asarray(scores, np.float64),
    )
    mini_batches = [[place[row.key] for row in batch] for batch in step.mini_batches]
    info = RoundInfo(
        groups=[GroupInfo(g.ordinal, g.row, g.label, g.task, g.dispatched) for g in step.groups],
        mini_batches=mini_batches,
        micro_batches=[
            [[[batch[i] for i in cut] for cut in cuts] for cuts in ranks]
            for batch, ranks in zip(mini_batches, step.micro_batches, strict=False)  # none where nothing was updated
        ],
        metrics=figures_out(step.metrics),
        kl_coef=kl_coef,
        kl_coef_after=kl_coef_after,
        skipped_updates=step.metrics.get("skipped_updates", 0.0),
    )
    return kept, info


def _task_reward(response: Response) -> float:
    assert response.reward is not None
    return response.reward
