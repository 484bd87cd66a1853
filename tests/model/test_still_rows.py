"""Rows without a gradient go forward only, and nothing else about an update changes."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.base import LossSpec
from rlctl.model.local import LocalEngine
from rlctl.schema.training import OptimizerConfig

VOCAB = 43
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")


def engine() -> LocalEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    return LocalEngine(model, OptimizerConfig(lr=1e-3, max_grad_norm=0.0), micro_batch_tokens=96)


def spec(loss: str, **more) -> LossSpec:
    return LossSpec(Objective(loss, {"clip_low": 0.2, "clip_high": 0.28}, **more), "token-mean", horizon=20)


def make_rows(still: list[bool]) -> list[Row]:
    rows = []
    for index, quiet in enumerate(still):
        prompt, response = ([random.randrange(VOCAB) for _ in range(random.randint(1, n))] for n in (6, 20))
        advantage = 0.0 if quiet else random.choice((-1, 1)) * random.uniform(0.1, 1)
        old = np.full(len(response), -3.7, np.float32)
        rows.append(
            Row(
                RequestKey(index, 0),
                index,
                prompt,
                response,
                0.0,
                old,
                np.zeros(len(response), np.int64),
                old_logprobs=old + np.float32(0.1),
                advantages=np.full(len(response), advantage, np.float32),
            )
        )
    return rows


def gradients(one: LocalEngine, rows: list[Row], loss: LossSpec, monkeypatch) -> tuple[dict, dict, list, list]:
    """Return the gradients, metrics and log-probs of one update, and the rows of each pass that had a gradient."""
    found, passes = {}, []
    score, step = one._score, one._optimizing.step

    def watched(batch, temperature, entropy):
        if torch.is_grad_enabled():
            passes.append(set(batch.indices))
        return score(batch, temperature, entropy)

    def stepped():
        found.update({n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None})
        return step()

    monkeypatch.setattr(one, "_score", watched)
    monkeypatch.setattr(one._optimizing, "step", stepped)
    result = one.update(rows, loss)
    return found, result.metrics, result.logprobs, passes


@pytest.mark.parametrize("loss", LOSSES)
def test_the_update_is_that_of_all_rows_with_gradient(loss, seed, monkeypatch):
    still = [random.random() < 0.5 for _ in range(14)] + [True, False]
    rows = make_rows(still)
    grads, metrics, logprobs, passes = gradients(engine(), rows, spec(loss), monkeypatch)
    assert set().union(*passes) == {i for i, quiet in enumerate(still) if not quiet}
    monkeypatch.setattr(Objective, "follows_advantage", False)
    whole, expected, known, all_passes = gradients(engine(), rows, spec(loss), monkeypatch)
    assert set().union(*all_passes) == set(range(len(rows)))
    assert grads.keys() == whole.keys()
    for name, grad in whole.items():
        assert torch.allclose(grads[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max())), name
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for one, other in zip(logprobs, known, strict=True):
        assert np.abs(one - other).max() < 1e-5


@pytest.mark.parametrize(
    "loss", [spec("ppo_clip", entropy_coef=0.1), spec("ppo_clip", kl="k3", kl_coef=0.1)], ids=["entropy", "kl"]
)
def test_terms_beside_the_policy_loss_keep_every_row_moving(loss, seed, monkeypatch):
    rows = [replace(row, ref_logprobs=row.rollout_logprobs) for row in make_rows([True, False, True])]
    grads, _, _, passes = gradients(engine(), rows, loss, monkeypatch)
    assert set().union(*passes) == {0, 1, 2}
    assert any(grad.abs().max() > 0 for grad in grads.values())


def test_a_token_outside_the_mask_moves_nothing(seed, monkeypatch):
    rows = make_rows([False, False, True])
    rows[0].mask = np.zeros(len(rows[0].response_ids), np.bool_)
    _, _, _, passes = gradients(engine(), rows, spec("ppo_clip"), monkeypatch)
    assert passes == [{1}]


def test_a_batch_without_any_signal_still_gives_the_optimizer_its_zeros(seed, monkeypatch):
    one = engine()
    one.update(make_rows([False] * 8), spec("ppo_clip"))  # of one row every token may be clipped
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    grads, metrics, _, _ = gradients(one, make_rows([True, True]), spec("ppo_clip"), monkeypatch)
    assert grads.keys() == before.keys()
    assert not any(grad.any() for grad in grads.values())
    assert metrics["grad_norm"] == 0
    # AdamW goes on by its first moment, as it would have.
    assert any((p != before[name]).any() for name, p in one.model.named_parameters())
