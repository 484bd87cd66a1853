"""What must hold between the keys of ``algorithm``. Each rule is one small pure function; none loads torch."""

from __future__ import annotations

from rlctl.algorithms.correction.settings import SECTION, Correction, parse_correction
from rlctl.algorithms.presets import preset_values
from rlctl.algorithms.traits import has_ratio, needs_values
from rlctl.config.keytable import get_value
from rlctl.errors import Finding, UsageError
from rlctl.rollout.registry import declared_traits
from rlctl.rollout.traits import ENGINE_TRAITS
from rlctl.schema import Config
from rlctl.trainers.rules import Rule


def correction_or_fault(config: Config) -> tuple[Correction, Finding | None]:
    """Return the correction that the keys describe, or an empty one and what is wrong with them."""
    keys = config.algorithm.rollout_correction
    try:
        found = parse_correction(
            keys.rollout_is,
            keys.rollout_is_threshold,
            keys.rollout_is_batch_normalize,
            keys.rollout_rs,
            keys.rollout_rs_threshold,
        )
    except UsageError as error:
        return Correction(), Finding(error.message, error.where, error.fix)
    return found, None


def values_have_a_critic(config: Config) -> Finding | None:
    name = config.algorithm.advantage
    if config.algorithm.critic.model is not None or not needs_values(name):
        return None
    return Finding(
        f"{name} needs the values of a critic, and there is none",
        "algorithm.critic.model",
        "set algorithm.critic.model=actor (a copy of the actor with a new head), or algorithm.advantage=grpo",
    )


def critic_has_a_use(config: Config) -> Finding | None:
    name = config.algorithm.advantage
    if config.algorithm.critic.model is None or needs_values(name):
        return None
    return Finding(
        f"a critic would be trained, and {name} does not ask for its values",
        "algorithm.critic.model",
        "leave it unset, or set algorithm.advantage=gae",
    )


def correction_is_well_formed(config: Config) -> Finding | None:
    return correction_or_fault(config)[1]


def correction_has_log_probs(config: Config) -> Finding | None:
    correction, _ = correction_or_fault(config)
    uses = correction.active or config.trainer.old_log_probs == "rollout"
    if not uses:
        return None
    traits = ENGINE_TRAITS.get(config.rollout.engine.partition(":")[0]) or declared_traits(config.rollout.engine)
    if traits is not None and not traits.logprobs:
        return Finding(
            f"the rollout's log-probs are needed, and engine {config.rollout.engine} returns none",
            "rollout.engine",
            "take another engine, or trainer.old_log_probs=recompute without algorithm.rollout_correction",
        )
    if config.rollout.temperature == 0:
        return Finding(
            "the rollout's log-probs are needed, and at temperature 0 no token is drawn by a probability",
            "rollout.temperature",
            "set it above 0, or trainer.old_log_probs=recompute without algorithm.rollout_correction",
        )
    return None


def correction_sees_all_of_the_distribution(config: Config) -> Finding | None:
    correction, _ = correction_or_fault(config)
    cut = config.rollout.top_p < 1 or config.rollout.top_k > 0
    if not cut or not (correction.active or config.trainer.old_log_probs == "rollout"):
        return None
    return Finding(
        "tokens are drawn from a part of the distribution (top_p, top_k), and log-probs are those of the whole: the "
        "correction does not see the cut",
        "rollout.top_p" if config.rollout.top_p < 1 else "rollout.top_k",
    )


def batch_is_there_to_normalise(config: Config) -> Finding | None:
    correction, _ = correction_or_fault(config)
    normalises = correction.weighting is not None and correction.weighting.batch_normalize
    if config.trainer.old_log_probs != "rollout" or not normalises:
        return None
    return Finding(
        "weights are divided by their mean over the mini batch, so the bypass spends the forward pass that it saved",
        f"{SECTION}.rollout_is_batch_normalize",
    )


def weights_meet_a_loss_that_takes_them(config: Config) -> Finding | None:
    correction, _ = correction_or_fault(config)
    bypass = config.trainer.old_log_probs == "rollout"
    if not bypass or correction.weighting is None or not has_ratio(config.algorithm.loss):
        return None
    return Finding(
        f"in a bypass the ratio of {config.algorithm.loss} is the importance weight already; rollout_is would count "
        "it twice",
        f"{SECTION}.rollout_is",
        "set algorithm.loss=reinforce, or trainer.old_log_probs=recompute, or leave rollout_is unset",
    )


def presets_stand_as_they_are(config: Config) -> Finding | None:
    changed = [
        f"{origin}: {key} is {get_value(config, key)}, not {value}"
        for origin, values in preset_values(config).items()
        for key, value in values.items()
        if get_value(config, key) != value
    ]
    return Finding("; ".join(changed), "algorithm.preset") if changed else None


def kl_in_the_loss_has_a_gradient(config: Config) -> Finding | None:
    kl = config.algorithm.kl
    if kl.place != "loss" or kl.estimator != "k1":
        return None
    return Finding(
        "the gradient of k1 in the loss is zero in the mean: it adds noise and holds nothing",
        "algorithm.kl.estimator",
        "set it to k2 or k3, or algorithm.kl.place=reward",
    )


def reference_has_a_use(config: Config) -> Finding | None:
    if config.algorithm.kl.reference is None or config.algorithm.kl.place != "none":
        return None
    return Finding(
        "a reference model is named, and no KL is taken",
        "algorithm.kl.reference",
        "set algorithm.kl.place to loss or reward, or leave it unset",
    )


def dual_clip_meets_a_loss_that_takes_it(config: Config) -> Finding | None:
    if config.algorithm.dual_clip is None or config.algorithm.loss not in ("cispo", "reinforce"):
        return None
    return Finding(
        f"loss {config.algorithm.loss} has no dual clip",
        "algorithm.dual_clip",
        "leave it unset, or set algorithm.loss=ppo_clip",
    )


def filtered_groups_can_differ(config: Config) -> Finding | None:
    if not config.algorithm.filter_groups:
        return None
    if config.rollout.samples_per_prompt > 1 and config.rollout.temperature > 0:
        return None
    return Finding(
        "groups without signal would be replaced, and no group can have any: one response a prompt, or temperature 0",
        "algorithm.filter_groups",
        "set it to false, or rollout.samples_per_prompt above 1 and rollout.temperature above 0",
    )


ALGORITHM: tuple[Rule, ...] = (
    Rule("an estimator that needs values has a critic", values_have_a_critic),
    Rule("a critic's values are asked for", critic_has_a_use),
    Rule("a reference model is used", reference_has_a_use),
    Rule("the KL in the loss has a gradient", kl_in_the_loss_has_a_gradient),
    Rule("rollout_correction can be read", correction_is_well_formed),
    Rule("log-probs of the rollout are there where they are needed", correction_has_log_probs),
    Rule("log-probs are those of what was drawn from", correction_sees_all_of_the_distribution, "note"),
    Rule("weights that are normalised are known as a batch", batch_is_there_to_normalise, "note"),
    Rule("importance weights count once", weights_meet_a_loss_that_takes_them),
    Rule("a dual clip meets a loss that takes it", dual_clip_meets_a_loss_that_takes_it),
    Rule("groups that are filtered can have a signal", filtered_groups_can_differ),
    Rule("presets stand as they are", presets_stand_as_they_are, "note"),
)
