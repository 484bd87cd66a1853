"""A hybrid engine that trains an adapter: its tokens are one process's, and its switches move the adapter alone."""

from __future__ import annotations

import random

import pytest
import torch

from rlctl.experience.segments import RequestKey
from rlctl.model.lora import LoraEngine
from rlctl.rollout.base import Request, SamplingParams
from rlctl.schema.work import LoraConfig
from tests.hybrid.engine_on_ranks import OPTIMIZER, PROMPTS
from tests.hybrid.lora.on_ranks import SAMPLES
from tests.hybrid.tp.sampling_on_ranks import MODELS
from tests.hybrid.tp.test_sampling import check_equal
from tests.hybrid.world import World
from tests.rollout.tiny import make_engine, make_model

AT = "tests.hybrid.lora.on_ranks:"


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


def merged(name: str, seed: int, lora: dict, adapter: dict[str, list[float]]):
    """The model of one process with this adapter folded in."""
    engine = LoraEngine(
        make_model(MODELS[name], seed).requires_grad_(True), OPTIMIZER, lora=LoraConfig(**lora), seed=seed, base=""
    )
    named = dict(engine.model.named_parameters())
    with torch.no_grad():
        for key, values in adapter.items():
            named[key].copy_(torch.tensor(values).view_as(named[key]))
    model = make_model(MODELS[name], seed)
    found = dict(model.named_parameters())
    for key, tensor in engine.per_tensor_params():
        found[key].copy_(tensor)
    return model


EVERYTHING = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


# Key-value heads on one rank each, and on several; an embedding and a head that are cut, and whole on every rank; what
# is kept of the base when the trainer's part leaves the device; a base that comes with every switch.
@pytest.mark.parametrize(
    ("name", "lora", "options"),
    [
        pytest.param("qwen2", {"rank": 8}, {}, marks=pytest.mark.slow),
        ("qwen3", {"rank": 3, "use_rslora": True}, {"tp_size": 4, "dp_size": 1, "offload": True}),
        ("qwen2", {"rank": 2, "target_modules": EVERYTHING}, {}),
        pytest.param(
            "qwen2", {"rank": 2, "target_modules": EVERYTHING}, {"embedding_sharding": "whole"}, marks=pytest.mark.slow
        ),
        ("llama", {"rank": 4, "sync": "merged"}, {}),
    ],
    ids=["all-linear", "rank-stabilised-parked", "vocabulary", "vocabulary-whole", "base-every-time"],
)
def test_later_switches_move_the_adapter_alone(ranks: World, name: str, lora, options, seed: int) -> None:
    found = ranks.call(AT + "learn_and_generate", name=name, seed=seed, lora=lora, **options)
    assert all(result["made"] == found[0]["made"] and result["base"] for result in found)
    params = SamplingParams(8)
    for step in (0, 2):
        model = merged(name, seed, lora, found[0]["adapters"][step])
        requests = [
            Request(RequestKey(10 * step + i, sample), tuple(prompt), params, seed)
            for i, prompt in enumerate(PROMPTS)
            for sample in range(SAMPLES)
        ]
        expected = [[list(o.key), o.token_ids, o.logprobs] for o in make_engine(model).generate(requests)]
        check_equal(model, requests, expected, found[0]["made"][step])
    planned, alone = found[0]["planned"], found[0]["alone"]
    assert 0 < alone < planned
    due = [planned] * 3 if lora.get("sync") == "merged" else [planned, alone, alone]
    assert [s["total_bytes"] for s in found[0]["switches"]] == due
    assert [sum(result["counted"][step] for result in found) for step in range(3)] == due
    kept = {s["kept_bytes"] for s in found[0]["switches"]}
    assert len(kept) == 1 and (kept == {0}) is (lora.get("sync") == "merged")
    assert max(kept) < max(found[0]["wanted"])  # of which the adapter is a part
    assert found[0]["trained"] == len(found[0]["adapters"][0])


def test_what_is_not_folded_in_there_is_refused_by_name(ranks: World) -> None:
    for dora, delta, tp in ranks.call(AT + "refusals", name="llama"):
        assert "DoRA" in dora and "use_dora" in dora
        assert "adapter alone" in delta and "tp cuts within layers" in tp
