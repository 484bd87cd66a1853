"""Two ranks that train and generate by vLLM in their own processes: what is generated is the trainer's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.hybrid.vllm.vllm_on_ranks import MODELS, PROMPTS, random_model
from tests.hybrid.world import World, world
from tests.rollout.tiny import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
AT = "tests.hybrid.vllm.vllm_on_ranks:"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


def model_of(name: str, weights: dict[str, list[float]]) -> Any:
    model = make_model(MODELS[name], 0)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(torch.tensor(weights[key]).view_as(parameter))
    return model


def scores(model: Any, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [len(tokens)] of the tokens, and how far each is below the likeliest."""
    with torch.no_grad():
        found = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen, found.max(-1).values - chosen


def check(model: Any, prompt: list[int], tokens: list[int], logprobs: list[float], *, greedy: bool) -> None:
    chosen, below = scores(model, prompt, tokens)
    assert (chosen - torch.tensor(logprobs)).abs().max() <= 1e-5
    assert not greedy or below.max() <= 1e-5  # the likeliest, or as likely within rounding


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2-tied", {"tp_size": 2, "dp_size": 1}),
        ("qwen3-one-kv-head", {"tp_size": 2, "dp_size": 1, "delta": True}),
        ("qwen2-tied", {"tp_size": 1, "dp_size": 2}),
        ("qwen2-tied", {"tp_size": 2, "dp_size": 1, "lora_rank": 4}),
    ],
    ids=["tp", "one-kv-head-delta", "dp", "adapter"],
)
def test_it_generates_with_what_was_learnt(pair: World, name: str, options: dict[str, Any], seed: int) -> None:
    found = pair.call(AT + "learn_and_generate", name=name, seed=seed, **options)
    assert [r["made"] for r in found[0]["rounds"]] == [r["made"] for r in found[1]["rounds"]]
    for number, told in enumerate(found[0]["rounds"]):
        assert told["gap"] <= 1e-5  # to the trainer's own
        model = model_of(name, told["weights"]) if told["weights"] else None
        for place, (prompt, tokens, logprobs, version) in enumerate(told["made"]):
            assert version == number and len(tokens) == 8
            if model is not None:
                check(model, prompt, tokens, logprobs, greedy=place < len(PROMPTS))
        drawn = [tokens for _, tokens, *_ in told["made"][len(PROMPTS) :]]
        assert drawn[0] != drawn[1]
    assert all(r["held"] > 0 == r["left"] for one in found for r in one["rounds"])
    first, second = found[0]["moved"]
    assert first == found[0]["planned"]
    assert second < first / 2 if "lora_rank" in options else second == first or "delta" in options


def test_what_is_learnt_and_generated_has_the_same_bits_twice(pair: World, seed: int) -> None:
    one, other = (
        pair.call(AT + "learn_and_generate", name="qwen2-tied", seed=seed, tp_size=2, dp_size=1) for _ in range(2)
    )
    assert one == other


def test_interrupted_requests_keep_their_tokens(pair: World, seed: int) -> None:
    one, other = pair.call(AT + "interrupted", name="qwen2-tied", seed=seed, tp_size=2, dp_size=1)
    assert one == other
    for straight, part, whole in zip(one["straight"], one["parts"], one["continued"], strict=True):
        assert part[2:] == ["abort", [0]] and 0 < len(part[0]) <= 5
        assert part[0] == straight[0][: len(part[0])] and part[1] == straight[1][: len(part[1])]
        assert whole[0] == straight[0] and whole[2:] == ["length", [0]]
    old, new = random_model("qwen2-tied", seed), model_of("qwen2-tied", one["weights"])
    for prompt, (tokens, logprobs, reason, versions) in zip(PROMPTS, one["mixed"], strict=True):
        assert (len(tokens), reason, versions) == (12, "length", [0, 1])
        by_old, by_new = scores(old, prompt, tokens)[0], scores(new, prompt, tokens)[0]
        wrong_old, wrong_new = ((torch.tensor(logprobs) - by).abs() > 1e-5 for by in (by_old, by_new))
        assert not (wrong_old & wrong_new).any() and wrong_old.any() and wrong_new.any()
    assert one["asleep"] is None
    for fault, word in zip(one["faults"], ("model.norm.weight ([127], not [128])", "(missing)", "model.more (unknown)"),
                           strict=True):  # fmt: skip
        assert word in fault


def test_a_rank_that_ends_while_all_generate_is_named(pair: World, seed: int) -> None:
    """The last test of the file: one of its ranks is gone afterwards."""
    pair.begin(AT + "left_alone", seed=seed, deadline=60.0)
    error, said = pair.children[0].answer(120.0)
    assert not error
    assert said.startswith("rank 0 waited for rank 1 (phase ") and " in generation, " in said
