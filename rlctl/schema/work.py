"""Keys of the work: the model that learns and the task that it learns."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from rlctl.schema.keys import key, section

ChatUse = Literal["auto", "template", "plain"]
OverlongPrompts = Literal["refuse", "truncate", "drop"]
DType = Literal["float32", "bfloat16"]
LoraSync = Literal["auto", "merged", "adapter"]


@dataclass
class LoraConfig:
    """Low-rank adaptation."""

    rank: int = key(0, "Rank of the adapter; 0 trains all weights.", low=0)
    alpha: float = key(16.0, "Scaling numerator of the adapter.", above=0)
    target_modules: list[str] = key(
        ["all-linear"], "Modules that get an adapter, by the ends of their names; `all-linear`: all but the head."
    )
    use_rslora: bool = key(False, "Rank-stabilised: the adapter counts alpha / sqrt(rank) times, not alpha / rank.")
    use_dora: bool = key(False, "DoRA: the length of each output's weights is trained apart from their direction.")
    sync: LoraSync = key(
        "auto",
        "What rollouts are sent: whole weights with the adapter folded in (`merged`), or the adapter alone "
        "(`adapter`), for which their base weights stay in memory while the trainer works. `auto`: `adapter` with "
        "placement.layout=hybrid, else `merged`.",
    )
    adapter: str | None = key(
        None, "Folder of a LoRA adapter for this model to begin with, of this rank, alpha and these modules; none: new."
    )


@dataclass
class ModelConfig:
    """The model that learns."""

    path: str = key("cycle-tiny", "Folder, hub name, or `cycle-tiny` for the built-in model.")
    dtype: DType = key("float32", "Element type of weights and activations; masters stay float32.")
    engine: str | None = key(
        None,
        "Model engine: local (one rank, whole), fsdp2 (with placement.trainer_tp: FSDP2 x TP), megatron (not built); "
        "local for one trainer rank, fsdp2 for several when not set.",
    )
    activation_dtype: DType | None = key(None, "Element type of the trainer's passes; model.dtype when not set.")
    gradient_checkpointing: bool = key(
        False, "Compute a layer's activations again in the backward pass instead of keeping them."
    )
    trust_remote_code: bool = key(False, "Run Python code that a model folder brings along.")
    lora: LoraConfig = section(LoraConfig, "Low-rank adaptation.")


@dataclass
class MixtureMember:
    """One of several tasks that a run mixes. The keys but ``weight`` mean what they do for a task by itself."""

    name: str = key(MISSING, "As task.name.")
    weight: float = key(1.0, "Share of the prompts, relative to the other weights.", above=0)
    verifier: str | None = key(None, "As task.verifier.")
    step: str | None = key(None, "As task.step.")
    tolerance: float = key(1e-6, "As task.tolerance.", low=0, high=1)
    prompt_field: str = key("prompt", "As task.prompt_field.")
    answer_field: str = key("answer", "As task.answer_field.")
    held_out: float = key(0.1, "As task.held_out.", low=0, high=0.9)


@dataclass
class TaskConfig:
    """Prompts and their rewards."""

    name: str = key(
        "cycle",
        "Built-in task, `reasoning_gym:NAME`, or a .jsonl or .parquet file or `hub:NAME` with `prompt` and `answer`.",
    )
    mixture: list[MixtureMember] = key(
        [], "Several tasks instead of task.name, each with a weight: [{name: cycle, weight: 3}, {name: math.jsonl}]."
    )
    verifier: str | None = key(
        None,
        "Built-in verifier (exact, numeric, regex, contains, json_schema, math; none: a reward model alone judges), or "
        "`module:function`, or "
        "`file.py:function`.",
    )
    step: str | None = key(
        None,
        "Instead of a verifier, for conversations of several turns over a data file: `module:function` or "
        "`file.py:function` with (messages, answer) -> (observation, reward, done).",
    )
    tolerance: float = key(
        1e-6, "Relative difference up to which the verifier `numeric` takes two numbers for equal.", low=0, high=1
    )
    prompt_field: str = key("prompt", "Field of a JSONL line that holds the prompt.")
    answer_field: str = key("answer", "Field of a JSONL line that holds the answer.")
    chat: ChatUse = key(
        "auto", "Chat template of the tokenizer: used where there is one (auto), demanded (template), not used (plain)."
    )
    system: str | None = key(None, "System message put before every prompt that has none; needs a chat template.")
    max_turns: int | None = key(
        None, "Most turns of a conversation; as many as rollout.max_new_tokens has room for when not set.", low=1
    )
    epochs: int | None = key(None, "Passes over a finite data set; as many as the steps need when not set.", low=1)
    max_prompt_tokens: int = key(256, "Longest prompt, in tokens.", low=1)
    overlong_prompts: OverlongPrompts = key(
        "refuse", "Longer prompts: refused before the first step, cut to their end (truncate), or left out (drop)."
    )
    held_out: float = key(
        0.1, "Share of a data set kept for evaluation, chosen by a hash of the prompt.", low=0, high=0.9
    )
    reward_timeout: float = key(10.0, "Deadline of one reward call.", unit="seconds", above=0)
