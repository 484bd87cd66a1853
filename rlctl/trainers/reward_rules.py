"""What must hold between the keys of ``reward_model`` and the rest. Each rule is one small pure function."""

from __future__ import annotations

from dataclasses import fields

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.schema.reward_model import RewardModelConfig
from rlctl.tasks.verifiers import NONE
from rlctl.trainers.rules import Rule


def reward_model_is_named(config: Config) -> Finding | None:
    model, default = config.reward_model, RewardModelConfig()
    changed = [field.name for field in fields(model) if getattr(model, field.name) != getattr(default, field.name)]
    if model.path is not None or not changed:
        return None
    return Finding(
        f"reward_model.{changed[0]} is set, and there is no reward model",
        "reward_model.path",
        f"set it to the model's folder, or leave reward_model.{changed[0]} out",
    )


def something_is_rewarded(config: Config) -> Finding | None:
    model = config.reward_model
    if model.path is None or model.weight or model.task_weight:
        return None
    return Finding(
        "neither the task nor the reward model counts: every reward would be 0",
        "reward_model.weight",
        "set it, or reward_model.task_weight, to another number than 0",
    )


def tasks_without_rewards_are_scored(config: Config) -> Finding | None:
    if config.reward_model.path is not None or NONE not in _verifiers(config):
        return None
    return Finding(
        "the verifier none gives no reward, and there is no reward model",
        "reward_model.path",
        "set it to the model's folder, or give task.verifier another name, such as exact",
    )


def held_out_answers_are_judged(config: Config) -> Finding | None:
    if NONE not in _verifiers(config) or not config.run.validate_prompts:
        return None
    return Finding("held-out accuracy is the task's own reward, which is 0 by verifier none", "run.validate_prompts")


def _verifiers(config: Config) -> list[str | None]:
    return [member.verifier for member in config.task.mixture] or [config.task.verifier]


def scores_count(config: Config) -> Finding | None:
    if config.reward_model.path is None or config.reward_model.weight:
        return None
    return Finding("responses are scored by the reward model, and the scores do not count", "reward_model.weight")


def reward_pool_has_a_model(config: Config) -> Finding | None:
    if config.reward_model.path is not None or not config.placement.reward_devices:
        return None
    return Finding(
        f"{config.placement.reward_devices} devices are kept for a reward model, and there is none",
        "placement.reward_devices",
    )


def groups_are_filtered_before_scores(config: Config) -> Finding | None:
    if config.reward_model.path is None or not config.algorithm.filter_groups:
        return None
    return Finding(
        "groups are replaced by the task's own rewards; the reward model scores only what is trained",
        "algorithm.filter_groups",
    )


REWARD: tuple[Rule, ...] = (
    Rule("settings of a reward model have a reward model", reward_model_is_named),
    Rule("something is rewarded", something_is_rewarded),
    Rule("a task without rewards has a reward model", tasks_without_rewards_are_scored),
    Rule("held-out answers are judged", held_out_answers_are_judged, "note"),
    Rule("scores count in the reward", scores_count, "note"),
    Rule("a pool for a reward model has a reward model", reward_pool_has_a_model, "note"),
    Rule("groups are filtered by the rewards that are trained", groups_are_filtered_before_scores, "note"),
)
