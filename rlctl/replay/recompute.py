"""Level R1: rewards, advantages, correction and loss of a step, from its record alone."""

from __future__ import annotations

from rlctl.experience.records.manifest import Failure
from rlctl.model.critic.base import Critic
from rlctl.replay.findings import Difference, Finding, next_lower
from rlctl.replay.recorded_models import RecordedCritic, RecordedModel, RecordedReference, Unrecorded
from rlctl.replay.step_record import StepRecord
from rlctl.replay.telling import Telling, tell
from rlctl.schema import Config
from rlctl.trainers.algorithm import Algorithm
from rlctl.trainers.training import TrainingStages

_OF_ENTROPY = ("loss", "entropy")
_OF_OTHER_DEVICES = 1e-5
"""Relative difference up to which sums of another kind of device than this one's CPU count as the same."""


def recompute(record: StepRecord) -> Finding:
    """Tell a step again with models that say what was recorded of them, through the trainer's own stages."""
    step, config = record.step, record.config
    algorithm = Algorithm(config)
    entropy = algorithm.loss_spec().objective.needs_entropy
    ignore = _OF_ENTROPY if entropy else ()
    notes = [of_failure(record.failure)] if record.failure is not None else []
    notes += ["the loss has an entropy bonus, of which no tokens are recorded: level R2 computes it"] if entropy else []
    if config.cluster.device != "cpu":
        notes.append(f"the loss was summed on {config.cluster.device}, and here within {_OF_OTHER_DEVICES:g} of that")
    try:
        for number, told in enumerate(record.rounds):
            algorithm.kl.value = told.kl_coef
            found = _tell(algorithm, record, number, ignore)
            if found.difference is not None:
                reason = of_failure(record.failure)
                return Finding(
                    step=step, level="R1", status="differs", reason=reason, first_difference=found.difference
                )
            if algorithm.kl.value != told.kl_coef_after:
                gap = abs(algorithm.kl.value - told.kl_coef_after)
                where = Difference("update_actor", "kl_coef", gap)
                return Finding(step=step, level="R1", status="differs", first_difference=where)
    except Unrecorded as absent:
        reason = f"the record does not hold {absent}{next_lower('R1')}"
        return Finding(step=step, level="R1", status="unavailable", reason=reason)
    return Finding(step=step, level="R1", status="exact", reason="; ".join(notes))


def _tell(algorithm: Algorithm, record: StepRecord, number: int, ignore: tuple[str, ...]) -> Telling:
    told, config = record.rounds[number], record.config
    relative = 0.0 if config.cluster.device == "cpu" else _OF_OTHER_DEVICES
    critic: Critic | None = RecordedCritic(told.rows) if config.algorithm.critic.model else None
    reference = RecordedReference(told.rows) if algorithm.needs_reference else None
    model = RecordedModel(
        told.rows, micro_batch_tokens=config.trainer.micro_batch_tokens, ranks=data_parallel_ranks(config)
    )
    stages = TrainingStages(config, algorithm, model, reference, critic)
    return tell(
        record.step,
        [told],
        config,
        stages.table,
        first_round=number,
        ignore=ignore,
        relative=relative,
        failure=record.failure,
    )


def of_failure(failure: Failure | None) -> str:
    """Return where a step failed and what it said, "" for one that did not."""
    return "" if failure is None else f"the step failed in stage {failure.stage}: {failure.message}"


def data_parallel_ranks(config: Config) -> int | None:
    """Return how many ranks share a step's rows; None where one process has all."""
    if config.model.engine != "fsdp2":
        return None
    return config.placement.trainer_ranks // config.placement.trainer_tp
