"""The losses against TRL's own code, where it implements the same thing."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlctl.algorithms.aggregation import token_weights
from rlctl.algorithms.objective import Objective
from tests.algorithms.flat import layout, random_tokens, seeded

pytestmark = pytest.mark.trl

# TRL's loss type -> (our loss, our aggregation)
SAME = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "dapo": ("ppo_clip", "token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "gspo": ("gspo", "seq-mean-token-mean"),
}
LOW, HIGH, HORIZON = 0.2, 0.28, 12


def trl_loss(kind, padded, tokens, logprobs, *, beta=0.0, entropy_coef=0.0, importance=None):
    """Return the loss of TRL's trainer, whose model is a table of log-probs."""
    from accelerate import Accelerator
    from trl.trainer.grpo_trainer import GRPOTrainer

    table = padded.table
    entropy = table(tokens.entropy.detach())
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type="grpo" if kind == "gspo" else kind,
        epsilon_low=LOW,
        # TRL's cispo bounds the ratio itself.
        epsilon_high=1 + HIGH if kind == "cispo" else HIGH,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=HORIZON,
        accelerator=Accelerator(cpu=True),
        _entropy_bonus_enabled=entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(padded.mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(padded.mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(padded.mask.shape, dtype=torch.int64),
        "completion_mask": padded.mask.long(),
        "advantages": table(tokens.advantages)[:, 0],
        "old_per_token_logps": table(tokens.old_logprobs),
        "ref_per_token_logps": table(tokens.ref_logprobs),
        "importance_sampling_ratio": None if importance is None else table(importance),
        "num_items_in_batch": padded.mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def compare(kind, *, kl_coef=0.0, entropy_coef=0.0, weighed=False) -> None:
    loss, aggregation = SAME[kind]
    padded = layout(7, HORIZON)
    tokens = random_tokens(padded, token_weights(aggregation, padded.mask.sum(1), horizon=HORIZON), dtype=torch.float64)
    tokens.weights = token_weights(aggregation, padded.mask.sum(1), horizon=HORIZON).double()[padded.row]
    if weighed:
        tokens.importance = torch.rand(tokens.row.numel(), dtype=torch.float64) * 2
    table = padded.table(tokens.logprobs.detach()).requires_grad_(True)
    expected = trl_loss(
        kind, padded, tokens, table, beta=kl_coef, entropy_coef=entropy_coef, importance=tokens.importance
    )
    expected.backward()
    options = {"clip_low": 1.0 if kind == "cispo" else LOW, "clip_high": HIGH}
    kl = "k3" if kl_coef else None
    result = Objective(loss, options, kl=kl, kl_coef=kl_coef, entropy_coef=entropy_coef)(tokens)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert (table.grad[padded.mask] - tokens.logprobs.grad).abs().max() < 1e-6


@pytest.mark.parametrize("kind", SAME)
def test_losses_and_their_gradients_are_trls(kind):
    seeded()
    compare(kind)
    compare(kind, kl_coef=0.3)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_correction_weights_are_trls(kind):
    seeded()
    compare(kind, weighed=True)


@pytest.mark.parametrize("kind", ["bnpo", "dapo"])
def test_the_entropy_bonus_is_trls_where_both_are_token_means(kind):
    seeded()
    compare(kind, entropy_coef=0.1)
