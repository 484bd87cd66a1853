"""Keys of the reward model: a model that scores responses beside the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.schema.keys import key
from rlctl.schema.work import DType

Normalize = Literal["none", "sigmoid", "batch"]
RewardInput = Literal["auto", "tokens", "chat", "text"]


@dataclass
class RewardModelConfig:
    """A frozen model that scores whole responses. It shares the trainer's devices, or has
    ``placement.reward_devices`` of its own."""

    path: str | None = key(
        None, "Folder or hub name of a sequence-classification model that scores responses; none when not set."
    )
    weight: float = key(1.0, "What a score counts in the reward.")
    task_weight: float = key(1.0, "What the task's own reward counts beside it; 0: the scores alone.", low=0)
    normalize: Normalize = key(
        "none",
        "Scores before they count: as they are; `sigmoid`: 1 / (1 + e^-score); `batch`: less the mean of the train "
        "batch, over its deviation.",
    )
    clip: float | None = key(None, "Greatest size of a score after that; larger ones are cut to it.", above=0)
    input: RewardInput = key(
        "auto",
        "What it reads: the policy's `tokens`; the `chat` by its own template; prompt and response as `text`; `auto`: "
        "tokens where both have one vocabulary, else chat where it has a template, else text.",
    )
    output: int | None = key(None, "Which of its outputs is the score, from 0, where it has several.", low=0)
    dtype: DType = key("float32", "Element type of its weights and activations.")
    timeout: float = key(600.0, "Deadline of a pass where it has devices of its own.", unit="seconds", above=0)
