"""The local engine: micro-batches change nothing, log-probs are transformers' own, state comes back bit for bit."""

import math
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config

from rlctl.algorithms.objective import Objective
from rlctl.errors import UsageError
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.base import LossSpec
from rlctl.model.loading import load_model, load_weights
from rlctl.model.local import LocalEngine
from rlctl.model.locate import find_model
from rlctl.model.memory_settings import NOTHING_SAVED, Memory
from rlctl.model.micro_batches import partition
from rlctl.model.schedule import learning_rate
from rlctl.rollout.embedded.fused_weights import fused_shape
from rlctl.rollout.embedded.transformers_model import empty_model
from rlctl.schema.training import OptimizerConfig
from rlctl.tasks.builtin_models import builtin_model_path

VOCAB = 61
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama-tied": LlamaConfig(vocab_size=VOCAB, intermediate_size=48, tie_word_embeddings=True, **SMALL),
    "qwen2-untied": Qwen2Config(vocab_size=VOCAB, intermediate_size=48, tie_word_embeddings=False, **SMALL),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ),
}
LOSS = LossSpec(Objective("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "token-mean", horizon=20)


def engine(
    kind: str, *, budget: int = 8192, dtype: str = "float32", seed: int = 0, memory: Memory = NOTHING_SAVED, **optimizer
) -> LocalEngine:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    settings = OptimizerConfig(**{"lr": 1e-3, **optimizer})
    return LocalEngine(model, settings, micro_batch_tokens=budget, dtype=dtype, memory=memory)


def random_rows(count: int = 12) -> list[Row]:
    rows = []
    for index in range(count):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 6))]
        response = [random.randrange(VOCAB) for _ in range(random.randint(1, 20))]
        rows.append(
            Row(
                RequestKey(index // 4, index % 4), index // 4, prompt, response, random.random(),
                np.full(len(response), -2.0, np.float32), np.zeros(len(response), np.int64),
                advantages=np.full(len(response), random.uniform(-1, 1), np.float32),
            )
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probs_are_those_of_a_plain_forward_pass(kind, seed):
    one, rows = engine(kind, budget=64), random_rows()
    values = one.log_probs(rows, temperature=0.7)
    for row, value in zip(rows, values, strict=True):
        with torch.no_grad():
            logits = one.model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].float() / 0.7
        expected = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1].gather(
            1, torch.tensor(row.response_ids)[:, None]
        )
        assert np.abs(value - expected.squeeze(1).numpy()).max() < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_update_does_not_depend_on_how_it_is_cut(kind, seed):
    rows = random_rows()
    results = {}
    for budget in (8192, 60, 1):
        one = engine(kind, budget=budget, max_grad_norm=1e9)
        result = one.update(rows, LOSS)
        results[budget] = (result.metrics, dict(one.model.named_parameters()))
    base_metrics, base_params = results[8192]
    for budget in (60, 1):
        metrics, params = results[budget]
        assert metrics["loss"] == pytest.approx(base_metrics["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(base_metrics["grad_norm"], rel=1e-4)
        # AdamW's first step is lr * sign(gradient): only a gradient near zero may differ.
        for name, value in params.items():
            assert (value - base_params[name]).abs().mean() < 1e-5


def test_the_first_update_is_the_policy_gradient(seed):
    rows, one = random_rows(4), engine("llama-tied", max_grad_norm=0)
    reference = engine("llama-tied").model
    total = sum(len(row.response_ids) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        logits = reference(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        chosen = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1].gather(1, torch.tensor(row.response_ids)[:, None])
        loss = loss - (chosen.squeeze(1) * torch.from_numpy(row.advantages)).sum() / total
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in reference.parameters()))
    result = one.update(rows, LOSS)
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert result.metrics["clip_fraction"] == 0
    assert result.tokens == sum(row.length for row in rows)


def test_state_comes_back_bit_for_bit(seed):
    rows = [random_rows() for _ in range(4)]
    one = engine("qwen2-untied")
    for batch in rows[:2]:
        one.update(batch, LOSS)
    saved = {k: ({n: t.clone() for n, t in v.items()} if isinstance(v, dict) else v) for k, v in one.state().items()}
    for batch in rows[2:]:
        one.update(batch, LOSS)
    other = engine("qwen2-untied", seed=9)
    other.load(saved)
    for batch in rows[2:]:
        other.update(batch, LOSS)
    assert other.params_digest() == one.params_digest()
    with pytest.raises(ValueError, match="differ"):
        engine("llama-tied").load(saved)


def test_an_update_with_an_infinite_gradient_changes_nothing(seed):
    rows, one = random_rows(), engine("llama-tied")
    before = one.params_digest()
    rows[0].advantages[:] = np.inf
    assert one.update(rows, LOSS).metrics["skipped_updates"] == 1.0
    assert one.params_digest() == before
    assert one.state()["updates"] == 0


def test_weights_are_handed_out_under_transformers_names_once_and_in_the_rollout_dtype():
    one = engine("llama-tied", dtype="bfloat16")
    given = dict(one.per_tensor_params())
    assert "lm_head.weight" not in given and "model.embed_tokens.weight" in given
    assert {t.dtype for t in given.values()} == {torch.bfloat16}
    assert {p.dtype for p in one.model.parameters()} == {torch.float32}
    untied = dict(engine("qwen2-untied").per_tensor_params())
    assert "lm_head.weight" in untied


def test_bfloat16_is_near_float32(seed):
    rows = random_rows()
    exact, rough = engine("llama-tied"), engine("llama-tied", dtype="bfloat16")
    for a, b in zip(exact.log_probs(rows, temperature=1.0), rough.log_probs(rows, temperature=1.0), strict=True):
        assert np.abs(a - b).max() < 0.1
    assert rough.update(rows, LOSS).metrics["grad_norm"] > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_saves_memory_changes_nothing(kind, seed):
    rows, digests = random_rows(), []
    for memory in (
        NOTHING_SAVED,
        Memory(gradient_checkpointing=True),
        Memory(offload_params=False),
        Memory(offload_optimizer=False),
    ):
        one = engine(kind, budget=60, memory=memory)
        for _ in range(2):
            one.offload()
            one.onload()
            one.update(rows, LOSS)
        digests.append(one.params_digest())
    assert len(set(digests)) == 1


def test_activations_may_be_rougher_than_what_rollouts_get(seed):
    rows = random_rows()
    exact, rough = engine("llama-tied"), engine("llama-tied", memory=Memory(activation_dtype="bfloat16"))
    pairs = zip(exact.log_probs(rows, temperature=1.0), rough.log_probs(rows, temperature=1.0), strict=True)
    assert 1e-5 < max(np.abs(a - b).max() for a, b in pairs) < 0.1
    assert {t.dtype for _, t in rough.per_tensor_params()} == {torch.float32}


def test_partition_covers_every_row_once_within_the_budget(seed):
    lengths = [random.randint(1, 300) for _ in range(200)]
    for budget in (1, 100, 1000, 10**6):
        groups = partition(lengths, budget)
        assert sorted(i for g in groups for i in g) == list(range(200))
        for group in groups:
            assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget
    assert len(partition([10] * 64, 640)) == 1


def test_schedules():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="cosine", min_lr_ratio=0.1)
    rates = [learning_rate(config, update, 104) for update in range(106)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55) and rates[104] == pytest.approx(0.1) and rates[105] == pytest.approx(0.1)
    assert learning_rate(OptimizerConfig(lr=2.0, schedule="linear"), 50, 100) == pytest.approx(1.0)
    assert learning_rate(OptimizerConfig(lr=2.0), 10**6, 1) == 2.0


def test_a_saved_folder_loads_again_with_equal_logits(tmp_path):
    one = engine("llama-tied")
    one.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(model(ids).logits, one.model(ids).logits)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/folder", "does not exist"), ("./nope", "does not exist"), ("cycle-tny", "does not exist")],
)
def test_a_missing_model_is_one_quick_error(path, message):
    with pytest.raises(UsageError, match=message):
        find_model(path)


def test_a_hub_name_is_not_waited_for_when_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Exception, match="HF_HUB_OFFLINE"):
        find_model("someone/some-model-that-is-not-cached")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="does not load"):
        load_model(find_model(str(tmp_path)), trust_remote_code=False)


def test_damaged_weights_and_a_missing_tokenizer_are_one_clear_error(tmp_path):
    good = builtin_model_path("cycle-tiny")
    assert good is not None
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(UsageError, match=r"the causal language model of .* does not load"):
        load_model(str(folder), trust_remote_code=False)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match=r"the tokenizer of .* does not load") as caught:
        load_model(str(folder), trust_remote_code=False)
    assert "\n" not in caught.value.message


def test_a_kept_policy_answers_while_the_current_one_stays(seed):
    one = engine("llama-tied", lr=1e-2)
    rows = random_rows()
    for row in rows:
        row.advantages = np.ones(len(row.response_ids), np.float32)
    before = one.log_probs(rows, temperature=0.7)
    one.keep_policy()
    for _ in range(2):
        one.update(rows, LOSS)
    now, digest = one.log_probs(rows, temperature=0.7), one.params_digest()
    kept = one.kept_log_probs(rows, temperature=0.7)
    assert all((a == b).all() for a, b in zip(before, kept, strict=True))
    assert any((a != b).any() for a, b in zip(now, kept, strict=True))
    assert one.params_digest() == digest
    assert all((a == b).all() for a, b in zip(now, one.log_probs(rows, temperature=0.7), strict=True))
    one.keep_policy()
    assert all((a == b).all() for a, b in zip(now, one.kept_log_probs(rows, temperature=0.7), strict=True))


def test_models_that_threads_make_at_once_are_each_as_if_alone(tmp_path):
    tied = CONFIGS["llama-tied"]
    AutoModelForCausalLM.from_config(tied).save_pretrained(tmp_path)
    init, tie = torch.nn.init.normal_, PreTrainedModel.tie_weights

    def make(number):
        if number % 2:
            return load_weights(str(tmp_path), trust_remote_code=False)
        assert fused_shape(tied) is not None
        return empty_model(tied, dtype=torch.float32, device="cpu", trust_remote_code=False)

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(make, range(24)))
    for model in models:
        assert model.lm_head.weight is model.get_input_embeddings().weight
    assert (torch.nn.init.normal_, PreTrainedModel.tie_weights) == (init, tie)
