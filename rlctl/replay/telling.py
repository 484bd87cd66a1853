"""A recorded step told again: its rows go through the training stages, and what each stage makes is compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlctl.experience.records.manifest import Failure, words_of
from rlctl.experience.records.reading import Round
from rlctl.experience.rows import Row
from rlctl.replay.comparing import column_difference, metrics_difference
from rlctl.replay.findings import Difference
from rlctl.replay.recorded_models import Unrecorded
from rlctl.schema import Config
from rlctl.trainers.batch_figures import batch_figures
from rlctl.trainers.rounds import metrics_of_step
from rlctl.trainers.scoring import mix_in
from rlctl.trainers.step import STAGES, StepState
from rlctl.trainers.training import StageFn

MADE: Mapping[str, tuple[str, ...]] = {
    "old_log_probs": ("old_logprobs",),
    "ref_log_probs": ("ref_logprobs",),
    "values": ("values",),
    "advantages": ("mask", "importance", "advantages", "returns"),
    "update_actor": ("train_logprobs",),
}
"""Stage -> the columns of rows that it fills."""
SETTINGS = ("kl_coef", "lr", "critic/lr")
"""Metrics that a stage begins with: where they differ, all else does for that."""


@dataclass
class Telling:
    """What came of a step that was told again.

    Attributes:
        metrics: of the step, as its stages gave them.
        difference: the first, None when there is none.
        params_digest: of the parameters after it, where there is a model.
        failed: the stage whose failure was recorded has failed again, with the same words.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    difference: Difference | None = None
    params_digest: str = ""
    failed: bool = False


def tell(
    step: int,
    rounds: Sequence[Round],
    config: Config,
    table: Mapping[str, StageFn],
    *,
    first_round: int = 0,
    ignore: Collection[str] = (),
    relative: float = 0.0,
    failure: Failure | None = None,
) -> Telling:
    """Run a step's stages from the rewards on, and compare.

    Args:
        step: its number.
        rounds: as recorded.
        config: resolved.
        table: of ``TrainingStages``.
        first_round: which of the step's the first of ``rounds`` is.
        ignore: metrics that are not compared.
        relative: how far a figure of the update may be from what was recorded.
        failure: that the step ended with; what was behind it is not told.
    """
    told, figures = Telling(), []
    state = StepState(step)
    for state.round, recorded in enumerate(rounds, first_round):
        state.rows, state.metrics = fresh_rows(recorded, config), {}
        end = failure if failure is not None and failure.round == state.round else None
        for difference in _stages(state, recorded, config, table, ignore, relative, end):
            told.difference = told.difference or difference
        figures.append(state.metrics)
        told.failed = end is not None and told.difference is None
    told.metrics = metrics_of_step(figures) if failure is None else {}
    return told


def _stages(
    state: StepState,
    recorded: Round,
    config: Config,
    table: Mapping[str, StageFn],
    ignore: Collection[str],
    relative: float,
    failure: Failure | None,
) -> Iterator[Difference]:
    """Run the stages of a round, up to the one that failed, and yield what differs, in their order."""
    if recorded.scores is not None:
        state.metrics |= mix_in(state.rows, recorded.scores, config.reward_model)
    state.metrics |= batch_figures(state.rows, state.number - 1)
    yield from _metrics("reward", state.metrics, recorded, ignore)
    yield from _columns("reward", ("reward",), state.rows, recorded.rows)
    for name in STAGES[STAGES.index("balance") :]:
        if (act := table.get(name)) is None:
            continue
        if failure is not None and name == failure.stage:
            yield from _fails(act, state, failure)
            yield from _columns(name, MADE.get(name, ()), state.rows, recorded.rows)
            return
        before = dict(state.metrics)
        act(state)
        if name == "balance":
            place = {row.key: index for index, row in enumerate(state.rows)}
            mine = [[place[row.key] for row in rows] for rows in state.mini_batches]
            if mine != [list(batch) for batch in recorded.mini_batches]:
                yield Difference(name, "mini_batches")
        made = {key: value for key, value in state.metrics.items() if before.get(key) != value}
        yield from _metrics(name, {key: made[key] for key in SETTINGS if key in made}, recorded, ignore)
        if name == "update_actor":
            yield from _passes(state, recorded)
        yield from _columns(name, MADE.get(name, ()), state.rows, recorded.rows)
        yield from _metrics(name, made, recorded, ignore, relative if name == "update_actor" else 0.0)


def _fails(act: StageFn, state: StepState, failure: Failure) -> Iterator[Difference]:
    try:
        act(state)
    except Unrecorded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was that the step ended with
        if words_of(error) != failure.message:
            yield Difference(failure.stage, f"error: {words_of(error)}")
    else:
        yield Difference(failure.stage, "error: none")


def _passes(state: StepState, recorded: Round) -> Iterator[Difference]:
    place = {row.key: index for index, row in enumerate(state.rows)}
    mine = [
        [[[place[rows[i].key] for i in cut] for cut in cuts] for cuts in ranks]
        for rows, ranks in zip(state.mini_batches, state.micro_batches, strict=False)
    ]
    if recorded.micro_batches and mine != [[[list(c) for c in r] for r in b] for b in recorded.micro_batches]:
        yield Difference("update_actor", "micro_batches")


def _columns(stage: str, names: Sequence[str], found: Sequence[Row], told: Sequence[Row]) -> Iterator[Difference]:
    for name in names:
        if difference := column_difference(stage, name, found, told):
            yield difference


def _metrics(
    stage: str, found: Mapping[str, float], recorded: Round, ignore: Collection[str], relative: float = 0.0
) -> Iterator[Difference]:
    compared = {name: value for name, value in found.items() if name not in ignore}
    if difference := metrics_difference(stage, compared, recorded.metrics, relative=relative):
        yield difference


def fresh_rows(recorded: Round, config: Config) -> list[Row]:
    """Return a round's rows as they were when their responses had the task's rewards, and nothing more."""
    policy = config.algorithm.overlong_responses
    rows = []
    for row, reward, cut in zip(recorded.rows, recorded.task_rewards, recorded.cut, strict=True):
        if cut and policy == "drop":
            continue
        mask = np.zeros(len(row.response_ids), np.bool_) if cut and policy == "mask" else row.sampled
        rows.append(
            replace(
                row,
                reward=reward,
                score=None,
                mask=mask,
                old_logprobs=None,
                advantages=np.zeros(0, np.float32),
                ref_logprobs=None,
                values=None,
                returns=None,
                importance=None,
                train_logprobs=None,
            )
        )
    return rows
