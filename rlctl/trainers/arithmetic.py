"""The numbers of a step, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.schema import Config


@dataclass(frozen=True)
class StepArithmetic:
    """What one step handles.

    Attributes:
        prompts: prompts of a train batch.
        samples: responses of a train batch, prompts x samples per prompt.
        mini_batch_prompts, mini_batch_samples: share of one optimizer update.
        updates: optimizer updates of a step.
        data_parallel: trainer ranks that see different samples.
        samples_per_rank: samples of one update on one rank.
        sequence_tokens: longest prompt and response together.
        tokens: most tokens that a step trains on.
        micro_batches: most forward and backward passes of one update on one rank.
        requests_per_replica: responses that one replica makes for a step, at most.
        rounds: those, over the slots of a replica, rounded up.
    """

    prompts: int
    samples: int
    mini_batch_prompts: int
    mini_batch_samples: int
    updates: int
    data_parallel: int
    samples_per_rank: int
    sequence_tokens: int
    tokens: int
    micro_batches: int
    requests_per_replica: int
    rounds: int


def step_arithmetic(config: Config) -> StepArithmetic:
    """Return the numbers of a step; where a division leaves a rest (the rules say so), it is rounded up."""
    trainer, placement, rollout = config.trainer, config.placement, config.rollout
    prompts, per_prompt = trainer.prompts_per_step, rollout.samples_per_prompt
    mini = trainer.mini_batch_prompts or prompts
    ranks = max(1, placement.trainer_ranks // placement.trainer_tp)
    updates = _up(prompts, mini)
    sequence = config.task.max_prompt_tokens + rollout.max_new_tokens
    per_rank = _up(min(mini, prompts) * per_prompt, ranks)
    requests = _up(prompts * per_prompt, max(1, placement.replicas))
    return StepArithmetic(
        prompts=prompts,
        samples=prompts * per_prompt,
        mini_batch_prompts=mini,
        mini_batch_samples=mini * per_prompt,
        updates=updates,
        data_parallel=ranks,
        samples_per_rank=per_rank,
        sequence_tokens=sequence,
        tokens=prompts * per_prompt * sequence,
        micro_batches=_up(per_rank, max(1, trainer.micro_batch_tokens // sequence)),
        requests_per_replica=requests,
        rounds=_up(requests, rollout.max_slots),
    )


def _up(number: int, by: int) -> int:
    return -(-number // by)
