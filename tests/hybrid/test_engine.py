"""A hybrid engine on four ranks: training is that of one process, whatever is generated in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlctl.experience.segments import RequestKey
from rlctl.hybrid.layouts import Sizes
from rlctl.hybrid.profiling import imbalance
from rlctl.model.local import LocalEngine
from rlctl.rollout.base import Request, SamplingParams
from tests.hybrid.engine_on_ranks import LOSS, OPTIMIZER, PROMPTS, recorded_rows
from tests.hybrid.tp.sampling_on_ranks import MODELS
from tests.hybrid.tp.test_sampling import check_equal
from tests.hybrid.world import World
from tests.rollout.tiny import make_engine, make_model

AT = "tests.hybrid.engine_on_ranks:"


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


def one_process(name: str, seed: int) -> LocalEngine:
    return LocalEngine(make_model(MODELS[name], seed).requires_grad_(True), OPTIMIZER)


@pytest.mark.parametrize(("name", "training"), [("llama", "dp+fsdp"), ("qwen3", "dp+fsdp+tp")])
def test_a_step_with_two_switches_is_that_of_one_process(ranks: World, name: str, training: str, seed: int) -> None:
    one, rows = one_process(name, seed), recorded_rows(name, seed)
    expected = one.log_probs(rows, temperature=LOSS.temperature)
    metrics, _ = one.accumulate(rows, LOSS)
    named = dict(one.model.named_parameters())
    norm = float(torch.stack([p.grad.norm() for p in named.values()]).norm())
    torch.optim.SGD(named.values(), lr=0.1).step()
    found = ranks.call(AT + "one_step", name=name, seed=seed, training=training, switches=True)
    for result in found:
        assert result["loss"] == found[0]["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)
        for a, b in zip(result["logprobs"], expected, strict=True):
            assert np.abs(np.asarray(a, np.float32) - b).max() <= 1e-5
        assert result["norm"] == pytest.approx(norm, rel=1e-4)
        for key, parameter in named.items():
            assert (torch.tensor(result["params"][key]) - parameter.detach().flatten()).abs().max() <= 1e-6, key


@pytest.mark.parametrize("training", ["dp+fsdp", pytest.param("dp+fsdp+tp", marks=pytest.mark.slow)])
def test_all_ways_of_a_backward_pass_give_the_same_gradients(ranks: World, training: str, seed: int) -> None:
    for found in ranks.call(
        "tests.hybrid.backward_on_ranks:gradients_by_ways", name="llama", seed=seed, training=training
    ):
        assert found["largest"] > 0.0
        assert max(found["differences"].values()) <= 1e-5 * found["largest"], found
        assert found["norm"] == pytest.approx(found["whole"], rel=1e-5)
        assert found["clipped"] == pytest.approx(found["whole"] / 2, rel=1e-4)


def test_switches_change_no_bit_of_a_step(ranks: World, seed: int) -> None:
    plain, switched, delta = (
        ranks.call(AT + "one_step", name="qwen2", seed=seed, training="dp+fsdp", switches=switches, delta=delta)[0]
        for switches, delta in ((False, False), (True, False), (True, True))
    )
    assert plain == switched == delta


WHOLE = {"training_parallel": "dp+fsdp+tp", "embedding_sharding": "whole"}


# In the last, both lives have one layout: weights would be shared in place, and what is parked must not be.
@pytest.mark.parametrize(
    ("name", "options", "moves"),
    [
        ("qwen2", {}, True),
        ("qwen2", WHOLE, True),
        ("qwen2", {"tp_size": 4, "dp_size": 1}, True),
        ("qwen2", {"delta": True}, True),
        ("odd", {"pad": True, "tp_size": 4, "dp_size": 1}, True),
        ("odd", {"pad": True, "delta": True}, True),
        ("odd-groups", {"pad": True, "tp_size": 4, "dp_size": 1, "offload": True}, True),
        ("llama-biases", {**WHOLE, "tp_size": 4, "dp_size": 1, "offload": True}, False),
        ("llama-biases", {**WHOLE, "tp_size": 4, "dp_size": 1, "offload": True, "delta": True}, False),
    ],
    ids=[
        "fsdp",
        "fsdp-tp-whole",
        "tp-4",
        "delta",
        "padded",
        "padded-delta",
        "padded-parked",
        "one-layout-parked",
        "one-layout-kept",
    ],
)
def test_it_generates_with_what_was_learnt(ranks: World, name: str, options, moves: bool, seed: int) -> None:
    found = ranks.call(AT + "generate_after_updates", name=name, seed=seed, **options)
    assert all(result["made"] == found[0]["made"] for result in found)
    model = make_model(MODELS[name], seed)
    for key, parameter in model.named_parameters():
        parameter.copy_(torch.tensor(found[0]["params"][key]).view_as(parameter))
    params = SamplingParams(8)
    requests = [
        Request(RequestKey(10 + i, sample), tuple(prompt), params, seed)
        for i, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]
    expected = [[list(o.key), o.token_ids, o.logprobs, ""] for o in make_engine(model).generate(requests)]
    check_equal(model, requests, expected, found[0]["made"][1])
    assert [response[3] for made in found[0]["made"] for response in made] == [0] * 10 + [1] * 10
    for result in found:
        report = result["report"]
        assert [s["to"] for s in report["switches"]] == ["rollout", "training", "rollout"]
        planned = report["planned_bytes"]
        assert report["imbalance"]["rollout"]["zeros"] == [rank["zeros"] for rank in found]
        assert any(rank["zeros"] for rank in found) is ("pad" in options)
        first, back, second = (s["total_bytes"] for s in report["switches"])
        assert (first, back) == (planned, 0) and (second <= planned if "delta" in options else second == planned)
        assert report["total_bytes"] == first + second == sum(report["device_pairs"].values())
        assert (report["switches"][2]["kept_bytes"] > 0) is ("delta" in options)
        assert (planned > 0) is (report["max_latency_ms"] > 0) is moves
        assert report["generation"]["sent_bytes"] > 0
        assert report["phases"].keys() >= {"cut", "wire", "place"}


@pytest.mark.parametrize(("count", "options"), [(50, {}), (6, {"warm_up": True}), (6, {"offload": True})])
def test_fifty_switches_leave_optimizer_and_loss_as_they_were(ranks: World, count: int, options, seed: int) -> None:
    found = ranks.call(AT + "many_switches", name="llama", seed=seed, count=count, **options)
    for result in found:
        assert result["same"] and result["updates"] == 2
        assert max(abs(loss - result["losses"][0]) for loss in result["losses"]) <= 1e-6
        assert abs(result["changed"] - result["losses"][0]) > 1e-6


def test_leaving_for_a_reward_model_moves_no_weights_twice(ranks: World) -> None:
    for result in ranks.call(AT + "reward_in_between", name="qwen3", seed=3):
        assert result["same"] and result["cache"] == 0 and result["weights_left"] is None
        moved = [["rollout", result["planned"]], ["reward", 0], ["rollout", 0], ["training", 0]]
        assert result["switches"] == moved


def test_a_dict_of_tensors_is_a_batch(ranks: World, seed: int) -> None:
    for rows, tensors, learnt, entropy in ranks.call(AT + "dict_of_tensors", name="llama", seed=seed):
        assert tensors == pytest.approx(rows, abs=1e-6)
        assert learnt == pytest.approx(entropy, abs=1e-5)


def test_wrong_arguments_and_wrong_modes_are_named(ranks: World) -> None:
    for found in ranks.call(AT + "refusals", name="llama"):
        sizes, training, mode, profile, sampler, step, batch, empty = found
        assert "tp_size 3 x dp_size 2 is not the 4 ranks" in sizes and "1 x 4, 2 x 2, 4 x 1" in sizes
        assert "did you mean 'dp+fsdp'" in training
        assert "no mode 'trainig'" in mode and "enable_profiling" in profile
        assert "switch_to_rollout" in sampler and "switch_to_training" in step
        assert "response_mask" in batch and "no rows" in empty


def test_imbalance_of_the_ranks_is_shown() -> None:
    config = MODELS["llama-biases"].to_dict()
    spread, kept = (
        imbalance(Sizes("dp+fsdp", "tp", 4, 1, embedding).plan(config, "F32", devices_per_node=4))
        for embedding in ("fsdp", "whole")
    )
    vocabulary = 2 * 67 * 48 * 4
    assert sum(kept["rollout"]["bytes"]) - sum(spread["rollout"]["bytes"]) == 3 * vocabulary
    assert kept["rollout"]["max_over_mean"] == 1.0 < spread["rollout"]["max_over_mean"] < 1.05
    assert spread["training"]["max_over_mean"] > 1.0
