"""Keys of the training loop: the mode and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.schema.keys import key, section

OldLogProbs = Literal["recompute", "rollout"]
Interruption = Literal["abort", "keep", "wait"]
Admission = Literal["pacing", "drop", "wait"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = key(5e-5, "Peak learning rate.", low=0)
    beta1: float = key(0.9, "Decay of the first moment.", low=0, high=1)
    beta2: float = key(0.95, "Decay of the second moment.", low=0, high=1)
    eps: float = key(1e-8, "Term added to the denominator.", low=0)
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0)
    max_grad_norm: float = key(1.0, "Gradients are clipped to this global norm; 0 clips nothing.", low=0)
    schedule: Schedule = key("constant", "Shape of the learning rate after warm-up.")
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", low=0)
    min_lr_ratio: float = key(0.0, "Learning rate at the end of the schedule, as a share of the peak.", low=0, high=1)


@dataclass
class OffloadConfig:
    """What leaves the devices for host memory while responses are made on them.

    When not set: all of it where rollouts share the trainer's devices, unless those are the CPU.
    """

    params: bool | None = key(None, "Move the parameters.")
    optimizer: bool | None = key(None, "Move AdamW's moments.")


@dataclass
class TrainerConfig:
    """The mode and its settings. Keys that default to null take the mode's own value.

    Where a doc gives several, they are those of sync, colocate_async and separate_async.
    """

    mode: str = key("sync", "Trainer mode: sync, colocate_async, separate_async, one_step_off, or a registered name.")
    prompts_per_step: int = key(16, "Prompts of one train batch.", low=1)
    mini_batch_prompts: int | None = key(
        None, "Prompts of one optimizer step (mode: the train batch / parameter_sync_step).", low=1
    )
    micro_batch_tokens: int = key(8192, "Most tokens of one forward and backward pass, padding counted.", low=1)
    parameter_sync_step: int | None = key(None, "Local updates between two weight syncs (mode: 1, 1, 4).", low=1)
    warmup_batches: float | None = key(None, "Train batches submitted ahead of the first step (mode: 0, 1, 4).", low=0)
    max_staleness: int | None = key(
        None, "Most weight versions between making and training a token (mode: 0, 2, 4).", low=0
    )
    admission: Admission | None = key(
        None, "What bounds staleness: pacing submissions, dropping or waiting (mode: pacing)."
    )
    partial_rollout: bool | None = key(None, "Continue interrupted responses (mode: off, on, on).")
    interruption: Interruption | None = key(
        None, "What a sync does to running requests (mode: wait; abort on shared devices, else keep)."
    )
    old_log_probs: OldLogProbs | None = key(
        None, "Where the old policy's log-probs come from (mode: recompute, recompute, rollout)."
    )
    rank_timeout: float = key(
        600.0,
        "Longest wait of trainer ranks for each other in one collective or pass; a rank that dies or stalls ends the "
        "run by name.",
        unit="seconds",
        above=0,
    )
    stall_timeout: float = key(
        600.0,
        "Longest time in which no response ends while a step waits for one; then all are queued again, and after as "
        "long again the run fails. More than the longest response takes.",
        unit="seconds",
        above=0,
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule.")
    offload: OffloadConfig = section(
        OffloadConfig, "What leaves the devices for host memory while responses are made on them."
    )
