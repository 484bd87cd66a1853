"""LoRA on two FSDP2 ranks, and on a single rank of its own, against LoRA in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import RlctlError, UsageError
from rlctl.model.lora import LoraEngine
from rlctl.model.memory_settings import Memory
from rlctl.runtime.ranks.adapted import RankedLoraEngine
from rlctl.runtime.ranks.messages import RankSetup
from rlctl.runtime.ranks.supervisor import TrainerRanks
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from tests.model.tiny import CONFIGS, LOSS, logprobs_of, random_rows

TARGET = "tests.model.fsdp2_targets:main"
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
LORA = LoraConfig(rank=4, alpha=16.0)
RANKS = {"fsdp2": 2, "local": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("qwen2")
    AutoModelForCausalLM.from_config(CONFIGS["qwen2-untied"]).save_pretrained(path)
    return path


def setups(kind: str, source: Path, lora: LoraConfig = LORA) -> list[RankSetup]:
    return [
        RankSetup(
            rank=rank, world=RANKS[kind], tp=1, store="", timeout=60.0, device="cpu", threads=1, source=str(source),
            trust_remote_code=False, optimizer=OPTIMIZER, dtype="float32", micro_batch_tokens=100, total_updates=1,
            memory=Memory(), engine=kind, lora=lora, seed=1,
        )
        for rank in range(RANKS[kind])
    ]  # fmt: skip


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, folder, tmp_path_factory) -> Iterator[TrainerRanks]:
    started = TrainerRanks(setups(request.param, folder), logs=tmp_path_factory.mktemp("logs"), target=TARGET)
    yield started
    started.close()


def rebuilt(ranks: TrainerRanks, folder: Path, lora: LoraConfig = LORA) -> RankedLoraEngine:
    ranks.call("rebuild", lora=vars(lora) | {"target_modules": list(lora.target_modules)})
    return RankedLoraEngine(ranks, str(folder), AutoConfig.from_pretrained(folder))


def alone(folder: Path) -> LoraEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return LoraEngine(model, OPTIMIZER, lora=LORA, seed=1, base=str(folder), micro_batch_tokens=100)


def test_updates_weights_and_digests_are_those_of_one_process(ranks, folder, seed):
    spread, one, rows = rebuilt(ranks, folder), alone(folder), random_rows(9)
    assert spread.params_digest() == one.params_digest()  # the same first values
    for _ in range(3):
        found, expected = spread.update(rows, LOSS), one.update(rows, LOSS)
        for mine, due in zip(found.logprobs, expected.logprobs, strict=True):
            assert np.allclose(mine, due, atol=1e-4)
        assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-3)
    one.load(spread.state())
    assert spread.params_digest() == one.params_digest()
    for parts in ("per_tensor_params", "adapter_params", "base_params"):
        mine, due = dict(getattr(spread, parts)()), dict(getattr(one, parts)())
        assert list(mine) == list(due)
        assert all(torch.equal(mine[name], due[name]) for name in due), parts
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(spread.per_tensor_params()), strict=False)
    for mine, due in zip(spread.log_probs(rows, temperature=1.0), logprobs_of(model, rows), strict=True):
        assert np.allclose(mine, due, atol=1e-5)


def test_the_base_scores_before_and_after_the_first_update(ranks, folder, seed):
    spread, rows = rebuilt(ranks, folder), random_rows(5)
    base = logprobs_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rows)
    before = spread.bare_base().log_probs(rows, temperature=1.0)
    for _ in range(2):
        assert spread.update(rows, LOSS).metrics["grad_norm"] > 0
    after = spread.bare_base().log_probs(rows, temperature=1.0)
    moved = spread.log_probs(rows, temperature=1.0)
    for due, one, other in zip(base, before, after, strict=True):
        assert np.allclose(one, due, atol=1e-5)
        assert np.array_equal(one, other)
    assert not any(np.allclose(one, other, atol=1e-3) for one, other in zip(moved, after, strict=True))
    spread.keep_policy()
    spread.update(rows, LOSS)
    for one, other in zip(spread.kept_log_probs(rows, temperature=1.0), moved, strict=True):
        assert np.array_equal(one, other)


def test_state_is_the_adapters_and_goes_on_bit_for_bit(ranks, folder, seed):
    spread, one = rebuilt(ranks, folder), alone(folder)
    first, second = random_rows(6), random_rows(6)
    one.update(first, LOSS)
    state = one.state()
    spread.load(state)
    assert spread.params_digest() == one.params_digest()
    found = spread.state()
    assert all("lora_" in name for name in found["params"])
    assert found["base_digest"] == state["base_digest"]
    for kind in ("params", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(found[kind][name], state[kind][name]) for name in state[kind])
    spread.update(second, LOSS)
    digest = spread.params_digest()
    again = rebuilt(ranks, folder)
    again.load(state)
    again.update(second, LOSS)
    assert again.params_digest() == digest


def test_what_does_not_fit_is_refused_and_the_ranks_live(ranks, folder, seed):
    spread, one = rebuilt(ranks, folder), alone(folder)
    digest, state = spread.params_digest(), one.state()
    bare = {name: value for name, value in state.items() if name != "base_digest"}
    name = next(iter(state["params"]))
    cases = {
        "holds a whole model": bare,
        "on other weights": {**state, "base_digest": "0"},
        "differ in 1 parameters": {**state, "params": {n: t for n, t in state["params"].items() if n != name}},
        "the model's is": {**state, "params": {**state["params"], name: state["params"][name][:, :1]}},
    }
    for match, wrong in cases.items():
        with pytest.raises(RlctlError, match=match):
            spread.load(wrong)
    assert spread.params_digest() == digest


def test_what_is_saved_is_begun_with(ranks, folder, seed, tmp_path):
    spread, rows = rebuilt(ranks, folder), random_rows(6)
    spread.update(rows, LOSS)
    spread.save_pretrained(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "base_model.json",
    }  # fmt: skip
    saved, sent = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), dict(spread.adapter_params())
    assert saved.keys() == sent.keys()
    assert all(torch.equal(saved[name], sent[name]) for name in saved)
    digest = spread.params_digest()
    begun = rebuilt(ranks, folder, LoraConfig(rank=4, alpha=16.0, adapter=str(tmp_path / "adapter")))
    assert begun.params_digest() == digest


def test_an_adapter_of_another_form_is_refused_by_the_rank_that_reads_it(folder, seed, tmp_path):
    one = alone(folder)
    one.save_pretrained(tmp_path / "adapter")
    wrong = LoraConfig(rank=2, alpha=16.0, adapter=str(tmp_path / "adapter"))
    with pytest.raises(UsageError, match=r"cannot be gone on from: 1 fault\n.* rank 4"):
        TrainerRanks(setups("fsdp2", folder, wrong), logs=tmp_path, target=TARGET)
