"""What stands beside the policy loss: entropy, masks, weights, the reference and the critic; against plain torch."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from rlctl.algorithms.correction.settings import Correction, Weighting
from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.base import LossSpec
from rlctl.model.critic.local import LocalCritic
from rlctl.model.local import LocalEngine
from rlctl.model.reference import ReferenceModel
from rlctl.schema.training import OptimizerConfig

VOCAB = 41
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    random.seed(value)
    np.random.seed(value % (1 << 32))
    return value


def model(kind: str = "llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)


def rows(count: int = 6) -> list[Row]:
    made = []
    for index in range(count):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 6))]
        length = random.randint(2, 12)
        row = Row(
            RequestKey(index, 0), index, prompt, [random.randrange(VOCAB) for _ in range(length)], 0.0,
            np.full(length, -2.0, np.float32), np.zeros(length, np.int64),
        )  # fmt: skip
        row.advantages = np.random.randn(length).astype(np.float32)
        row.mask = np.arange(length) % 3 != 1
        row.importance = np.random.rand(length).astype(np.float32)
        row.ref_logprobs = np.random.randn(length).astype(np.float32) - 3
        row.values = np.random.randn(length).astype(np.float32)
        row.returns = np.random.randn(length).astype(np.float32)
        made.append(row)
    return made


def engine(kind: str, budget: int = 8192) -> LocalEngine:
    return LocalEngine(model(kind), OptimizerConfig(lr=0.0, max_grad_norm=0), micro_batch_tokens=budget)


def plain_terms(one, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the response tokens by one plain forward pass."""
    logits = one(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].float() / temperature
    inside = torch.distributions.Categorical(logits=logits[len(row.prompt_ids) - 1 : -1])
    return inside.log_prob(torch.tensor(row.response_ids)), inside.entropy()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("budget", [8192, 30])
def test_loss_and_gradient_with_every_term_are_those_of_plain_torch(kind: str, budget: int) -> None:
    batch, temperature = rows(), 0.8
    objective = Objective("reinforce", kl="k2", kl_coef=0.3, entropy_coef=0.05)
    result = engine(kind, budget).update(batch, LossSpec(objective, "token-mean", 20, temperature))
    reference, count = model(kind), sum(row.trained for row in batch)
    loss, entropies = torch.zeros(()), 0.0
    for row in batch:
        logprobs, entropy = plain_terms(reference, row, temperature)
        mask = torch.from_numpy(row.mask)
        policy = -torch.from_numpy(row.advantages) * logprobs * torch.from_numpy(row.importance)
        kl = (torch.from_numpy(row.ref_logprobs) - logprobs) ** 2 / 2
        loss = loss + ((policy + 0.3 * kl - 0.05 * entropy) * mask).sum() / count
        entropies += (entropy * mask).sum().item() / count
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert result.metrics["entropy"] == pytest.approx(entropies, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_bypass_normalises_its_weights_over_the_mini_batch_however_it_is_cut(level: str) -> None:
    batch = rows()
    for row in batch:
        row.rollout_logprobs = np.random.uniform(-5, -3, len(row.response_ids)).astype(np.float32)
        row.importance = None
    correction = Correction(Weighting(level, upper=1.5, batch_normalize=True))
    objective = Objective("reinforce", bypass=True, correction=correction)
    found = [engine("llama", size).update(batch, LossSpec(objective, "token-mean", 20)) for size in (8192, 1)]
    reference, loss, count = model(), torch.zeros(()), sum(row.trained for row in batch)
    logprobs = [plain_terms(reference, row, 1.0)[0] for row in batch]
    gaps = [
        (value - torch.from_numpy(row.rollout_logprobs)).detach()[torch.from_numpy(row.mask)]
        for value, row in zip(logprobs, batch, strict=True)
    ]
    weights = [
        (gap if level == "token" else gap.sum().expand_as(gap)).clamp(-20, 20).exp().clamp(max=1.5) for gap in gaps
    ]
    factor = torch.cat(weights).mean() if level == "token" else torch.stack([w.mean() for w in weights]).mean()
    for value, weight, row in zip(logprobs, weights, batch, strict=True):
        mask = torch.from_numpy(row.mask)
        loss = loss - (value * torch.from_numpy(row.advantages))[mask] @ weight / factor / count
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm().item()
    for result in found:
        assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_log_probs_of_masked_tokens_come_back_all_the_same() -> None:
    batch = rows()
    result = engine("llama").update(batch, LossSpec(Objective("ppo_clip"), "token-mean", 20))
    for row, value in zip(batch, result.logprobs, strict=True):
        assert np.abs(value - plain_terms(model(), row, 1.0)[0].detach().numpy()).max() < 1e-5


def test_a_mini_batch_without_a_trained_token_has_no_gradient() -> None:
    batch = rows()
    for row in batch:
        row.mask = np.zeros_like(row.mask)
    result = engine("llama").update(batch, LossSpec(Objective("gspo"), "seq-mean-token-mean", 20))
    assert (result.metrics["grad_norm"], result.metrics["loss"]) == (0.0, 0.0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_reference_scores_and_stays(kind: str) -> None:
    one, batch = model(kind), rows()
    reference = ReferenceModel(one, dtype="float32", micro_batch_tokens=30)
    for row, value in zip(batch, reference.log_probs(batch, temperature=0.7), strict=True):
        assert np.abs(value - plain_terms(one, row, 0.7)[0].detach().numpy()).max() < 1e-5
    assert not any(parameter.requires_grad for parameter in one.parameters())


def critic(kind: str = "llama", budget: int = 8192, lr: float = 1e-3) -> LocalCritic:
    made = LocalCritic(model(kind), OptimizerConfig(lr=lr, max_grad_norm=0), micro_batch_tokens=budget)
    with torch.no_grad():
        made.model.head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    return made


@pytest.mark.parametrize("kind", CONFIGS)
def test_values_are_of_the_state_before_each_token_and_begin_at_zero(kind: str) -> None:
    fresh, made, batch = LocalCritic(model(kind), OptimizerConfig()), critic(kind, 30), rows()
    assert all((value == 0).all() for value in fresh.values(batch))
    for row, value in zip(batch, made.values(batch), strict=True):
        hidden = made.model.body(torch.tensor([row.prompt_ids + row.response_ids])).last_hidden_state[0]
        expected = made.model.head(hidden[len(row.prompt_ids) - 1 : -1]).squeeze(1)
        assert np.abs(value - expected.detach().numpy()).max() < 1e-5


def test_the_critics_update_does_not_depend_on_how_it_is_cut_and_lowers_its_loss() -> None:
    batch = rows()
    whole, cut = critic(), critic(budget=1)
    found = [one.update(batch, clip=0.2) for one in (whole, cut)]
    assert found[0]["critic/loss"] == pytest.approx(found[1]["critic/loss"], rel=1e-5)
    assert found[0]["critic/grad_norm"] == pytest.approx(found[1]["critic/grad_norm"], rel=1e-4)
    losses = [whole.update(batch, clip=None)["critic/loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_the_critic_comes_back_bit_for_bit() -> None:
    batches = [rows() for _ in range(4)]
    one = critic()
    for batch in batches[:2]:
        one.update(batch, clip=0.2)
    saved = {k: ({n: t.clone() for n, t in v.items()} if isinstance(v, dict) else v) for k, v in one.state().items()}
    for batch in batches[2:]:
        one.update(batch, clip=0.2)
    other = critic()
    other.load(saved)
    for batch in batches[2:]:
        other.update(batch, clip=0.2)
    assert other.params_digest() == one.params_digest()
