"""Keys of rollout, weight sync and the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.schema.keys import key

Commit = Literal["inplace", "staged"]
Verify = Literal["full", "sampled", "off"]
Record = Literal["off", "events", "batches", "full"]

MOST_THREADS = 1024
"""Compute threads of a process. Far more than that end it without a word."""


@dataclass
class RolloutConfig:
    """How responses are made."""

    engine: str = key("transformers", "Rollout engine.")
    samples_per_prompt: int = key(8, "Responses of one prompt (the group size n).", low=1)
    max_new_tokens: int = key(192, "Longest response, in tokens.", low=1)
    temperature: float = key(1.0, "Sampling temperature of training rollouts; 0 is greedy.", low=0)
    top_p: float = key(1.0, "Nucleus of training rollouts; 1 keeps all.", above=0, high=1)
    top_k: int = key(0, "Keep the k likeliest tokens; 0 keeps all.", low=0)
    max_slots: int = key(64, "Responses decoded at once by one replica.", low=1)


@dataclass
class SyncConfig:
    """How fresh weights reach the rollout engines."""

    backend: str = key("naive", "Checkpoint engine that carries the weights.")
    bucket_size: int = key(512 << 20, "Size of one transfer bucket.", unit="bytes", low=1)
    timeout: float = key(300.0, "Deadline of one sync, all phases together.", unit="seconds", above=0)
    commit: Commit = key("inplace", "inplace streams into the live buffers; staged fills a shadow copy first.")
    verify: Verify = key("full", "How much of a sync is checked by digests.")
    delta: bool = key(False, "Send only what changed since the last sync; what is compared with it is kept in memory.")


@dataclass
class RunConfig:
    """The run itself."""

    steps: int = key(60, "Training steps.", low=0)
    seed: int = key(0, "Seed of everything that is random.", low=0)
    threads: int = key(
        0, "Compute threads of a process; 0 takes the machine's cores, at most 2.", low=0, high=MOST_THREADS
    )
    deterministic: bool = key(False, "Same seed, same parameters, bit for bit, in every mode.")
    record: Record = key(
        "events",
        "What a run records for replay: nothing, what happened, each step's batch beside it, or also a digest of every "
        "parameter and optimizer moment.",
    )
    record_window: int = key(
        32, "Last steps whose record is kept, with the checkpoints that lead to them; 0 keeps all.", low=0
    )
    record_keep: list[str] = key(
        ["loss~6", "grad_norm~6", "reward~6", "kl_loss~6", "kl_reward~6", "ppo_kl~6"],
        "Figures that keep a step's record beyond the window when they are odd: NAME=LOW..HIGH, or NAME~TIMES, its "
        "spread over the 32 steps before. What is not finite, or skipped an update, is odd too.",
    )
    record_pins: int = key(8, "Odd steps kept beyond the window, the latest.", low=0)
    checkpoint_every: int = key(10, "Steps between checkpoints; 0 saves only the last.", low=0)
    keep_checkpoints: int = key(2, "Checkpoints kept.", low=1)
    validate_every: int = key(0, "Steps between evaluations; 0 evaluates before and after only.", low=0)
    validate_prompts: int = key(256, "Held-out prompts of an evaluation.", low=0)
    validate_before: bool = key(True, "Evaluate before the first step.")
    validate_only: bool = key(False, "Evaluate what --resume or --model names, and train nothing.")
    trackers: list[str] = key(
        [], "Where figures go besides metrics.jsonl: tensorboard, wandb, trackio, or names from other packages."
    )
    tracker_project: str = key("rlctl", "Project that wandb and trackio file the run under.")
    tracker_timeout: float = key(
        60.0, "Time after which a tracker that does not answer, or does not end, is left out.", unit="seconds", above=0
    )
