"""What a configuration's algorithm amounts to, in words; no torch here."""

from __future__ import annotations

from rlctl.algorithms.correction.settings import Correction
from rlctl.schema import Config
from rlctl.trainers.algorithm_rules import correction_or_fault


def algorithm_words(config: Config) -> dict[str, str]:
    """Return part of the algorithm -> what it does in this run; a part that the run has not is left out."""
    a = config.algorithm
    extra = f", entropy bonus {a.entropy_coef:g}" if a.entropy_coef else ""
    lora = config.model.lora
    forms = [*(["rank-stabilised"] if lora.use_rslora else []), *(["DoRA"] if lora.use_dora else []), "adapter"]
    modules = ", ".join(lora.target_modules)
    trained = f"{' '.join(forms)} of rank {lora.rank}, alpha {lora.alpha:g}, on {modules}"
    words = {
        **({"reward": _reward(config)} if config.reward_model.path else {}),
        **({"trained weights": trained} if lora.rank else {}),
        "advantages": a.advantage + (f", values of critic {a.critic.model}" if a.critic.model else ""),
        "loss": f"{a.loss}, {a.aggregation}{extra}",
        "old log-probs": "the rollout's" if config.trainer.old_log_probs == "rollout" else "recomputed",
    }
    correction, _ = correction_or_fault(config)
    if correction.active:
        where = "in the loss (bypass)" if config.trainer.old_log_probs == "rollout" else "before the advantages"
        words["rollout correction"] = f"{_correction(correction)}; {where}"
    if a.kl.place != "none":
        weight = f"{a.kl.coef:g}" + (f" steered to {a.kl.target:g}" if a.kl.target is not None else "")
        words["KL"] = f"{a.kl.estimator} in the {a.kl.place}, weight {weight}, to {a.kl.reference or 'the first model'}"
    if a.filter_groups:
        words["groups without signal"] = f"replaced, over at most {a.filter_max_batches} train batches of prompts"
    if a.overlong_responses != "truncate":
        words["cut responses"] = {"mask": "not trained, but in the baseline", "drop": "left out"}[a.overlong_responses]
    return words


def _reward(config: Config) -> str:
    model = config.reward_model
    shaped = {"none": "", "sigmoid": ", sigmoid", "batch": ", over the batch's mean and deviation"}[model.normalize]
    bound = f", cut at {model.clip:g}" if model.clip is not None else ""
    pool = config.placement.reward_devices
    where = f"{pool} device{'s' if pool > 1 else ''} of its own" if pool else "the trainer's devices"
    own = f"{model.task_weight:g} x the task's + " if model.task_weight else ""
    return f"{own}{model.weight:g} x the score of {model.path}{shaped}{bound}, on {where}"


def _correction(correction: Correction) -> str:
    parts = []
    weighting = correction.weighting
    if weighting is not None:
        bound = (
            f"0 outside {weighting.lower:g} .. {weighting.upper:g}" if weighting.lower else f"<= {weighting.upper:g}"
        )
        normalised = ", over their mean" if weighting.batch_normalize else ""
        parts.append(f"{weighting.level} weights {bound}{normalised}")
    if correction.rejections:
        parts.append(f"rejection by {', '.join(rejection.option for rejection in correction.rejections)}")
    return ", ".join(parts)
