"""Keys of the algorithm: advantages, loss, KL, critic and rollout correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.schema.keys import key, section

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlPlace = Literal["none", "loss", "reward"]
KlEstimator = Literal["k1", "k2", "k3"]
Overlong = Literal["truncate", "mask", "drop"]
WeightLevel = Literal["token", "sequence"]


@dataclass
class KlConfig:
    """How the policy is held near a reference model."""

    place: KlPlace = key("none", "Where the KL to the reference model counts: as a term of the loss or in the reward.")
    estimator: KlEstimator = key("k3", "Estimator: k1 = -l, k2 = l^2/2, k3 = e^l - 1 - l with l = log(ref / policy).")
    coef: float = key(0.001, "Weight of the KL.", low=0)
    target: float | None = key(None, "KL of a token that the weight is steered to; fixed when not set.", above=0)
    horizon: float = key(10_000.0, "Samples over which the weight is steered.", above=0)
    reference: str | None = key(None, "Folder or hub name of the reference model; model.path when not set.")


@dataclass
class CriticConfig:
    """The model that says what a state is worth. Optimizer settings but the rate are those of the actor."""

    model: str | None = key(
        None, "Value model: `actor` (a copy of the actor with a new head), a folder or hub name; none when not set."
    )
    lr: float = key(1e-4, "Peak learning rate of the critic.", low=0)
    value_clip: float | None = key(0.2, "Greatest change of a value in a step that the loss rewards.", above=0)
    warmup_steps: int = key(0, "Steps in which the critic alone is trained.", low=0)


@dataclass
class RolloutCorrectionConfig:
    """What is done about the gap between the policy that samples and the one that is trained.

    ``trainer.old_log_probs`` says how: `recompute` corrects against the recomputed old policy (decoupled), `rollout`
    takes the rollout's log-probs as the old ones (bypass).
    """

    preset: str | None = key(None, "Named settings of this section, the loss and trainer.old_log_probs.")
    rollout_is: WeightLevel | None = key(None, "Importance weights of tokens or whole sequences; none when not set.")
    rollout_is_threshold: str = key("2.0", "A number C cuts weights to C; lo_hi sets weights outside to 0 (IcePop).")
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean over the batch.")
    rollout_rs: str | None = key(
        None,
        "Comma list of criteria that trained tokens must meet, such as token_k1 or seq_mean_k3; null: none.",
    )
    rollout_rs_threshold: str | None = key(
        None, "Bounds of rollout_rs, one for all or a comma list: lo_hi or x for k1, an upper bound for k2 and k3."
    )


@dataclass
class AlgorithmConfig:
    """Advantages and loss."""

    preset: str | None = key(None, "Named settings of this section: dr_grpo, dapo, gspo, cispo, rloo or ppo.")
    advantage: str = key("grpo", "Advantage estimator: grpo, rloo, reinforce_pp, reinforce_pp_baseline or gae.")
    normalize_std: bool = key(True, "Divide a group's advantages by its standard deviation (grpo).")
    leave_one_out: bool = key(False, "Take the mean of the group's other responses as the baseline (grpo).")
    gamma: float = key(1.0, "Discount of a token (gae, reinforce_pp).", low=0, high=1)
    lam: float = key(1.0, "Weight of longer estimates (gae).", low=0, high=1)
    whiten_advantages: bool = key(True, "Bring the batch's advantages to mean 0 and variance 1 (gae).")
    loss: str = key("ppo_clip", "Policy loss: ppo_clip, gspo, cispo or reinforce.")
    clip_low: float = key(0.2, "Lower clip distance of the ratio.", low=0)
    clip_high: float = key(0.28, "Upper clip distance of the ratio.", low=0)
    dual_clip: float | None = key(
        None, "Greatest loss of a token with a negative advantage, in multiples of it (ppo_clip, gspo).", above=1
    )
    aggregation: Aggregation = key("token-mean", "How token losses become one number.")
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", low=0)
    filter_groups: bool = key(False, "Replace prompts whose responses all have one reward by new ones (DAPO).")
    filter_max_batches: int = key(10, "Train batches of prompts that a step may generate to replace those.", low=1)
    overlong_responses: Overlong = key(
        "truncate",
        "Responses cut at rollout.max_new_tokens: trained as they are, not trained but counted in their group's "
        "baseline (mask), or left out of both (drop).",
    )
    kl: KlConfig = section(KlConfig, "How the policy is held near a reference model.")
    critic: CriticConfig = section(CriticConfig, "The model that says what a state is worth.")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "What is done about the gap between rollout and trainer."
    )
