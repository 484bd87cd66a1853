"""Ranks of a replica make the tokens of one process, each with its part of weights and cache."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlctl.errors import UsageError
from rlctl.hybrid.tp.engine import TensorParallelEngine
from rlctl.hybrid.tp.group import TensorGroup
from rlctl.rollout.embedded.noise import stream_key, uniforms
from tests.hybrid.tp.sampling_on_ranks import MODELS, plain
from tests.hybrid.world import World
from tests.rollout.tiny import make_engine, make_model, make_requests

AT = "tests.hybrid.tp.sampling_on_ranks:"
EDGE = 3e-6
"""Noise this near to the edge between two tokens may fall on either side, by rounding."""


@pytest.fixture
def seed() -> int:
    value = random.randrange(1 << 30)
    print("seed", value)
    return value


def at_an_edge(model, request, ids: list[int]) -> bool:
    """Whether the last of ``ids`` was drawn by noise at the edge between two tokens; plain sampling only."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *ids[:-1]]])).logits[0, -1].double()
    cumulative = logits.softmax(-1).cumsum(-1)
    key = np.array([stream_key(request.seed, request.key)], dtype=np.uint64)
    noise = float(uniforms(key, np.array([len(ids) - 1]))[0])
    return bool(((cumulative - noise).abs() < EDGE).any())


def first_difference(one: list[int], many: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, many, strict=False)) if a != b)


def check_equal(model, requests, expected, found) -> None:
    """Compare the outputs of ranks with one process's: equal, or parted by noise at an edge."""
    for request, one, many in zip(requests, expected, found, strict=True):
        assert one[0] == many[0]
        same = one[1] == many[1]
        length = len(one[1]) if same else first_difference(one[1], many[1])
        assert np.abs(np.subtract(one[2][:length], many[2][:length])).max(initial=0) < 1e-5
        assert same or at_an_edge(model, request, one[1][: length + 1])


# Fewer key-value heads than ranks, down to one; 67 token ids, which nothing divides.
@pytest.mark.parametrize(
    ("name", "tp", "options"),
    [
        ("llama-biases", 2, {}),
        ("qwen3", 2, {}),
        ("qwen2", 2, {"whole_vocab": True}),
        ("llama", 4, {}),
        ("one-kv-head", 4, {}),
        ("qwen3", 4, {"whole_vocab": True}),
        ("odd", 2, {"pad": True}),
        ("odd", 4, {"pad": True}),
        ("odd-groups", 4, {"pad": True}),
    ],
)
def test_tokens_are_those_of_one_process(ranks: World, name: str, tp: int, options, seed: int) -> None:
    model = make_model(MODELS[name], seed)
    asked = {"count": 10, "seed": seed, "samples": 2, "longest": 20}
    requests = make_requests(**asked)
    expected = make_engine(model, max_slots=8).generate(requests)
    found = ranks.call(AT + "generate", name=name, seed=seed, tp=tp, requests=asked, max_slots=8, **options)
    for result in found:
        assert result["outputs"] == found[0]["outputs"]
    check_equal(model, requests, plain(expected), found[0]["outputs"])


def test_cuts_and_greedy_rows_are_those_of_one_process(ranks: World, seed: int) -> None:
    model = make_model(MODELS["qwen2"], 5)
    for params in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 12}):
        asked = {"count": 6, "seed": 11, "longest": 12, **params}
        expected = plain(make_engine(model).generate(make_requests(**asked)))
        for result in ranks.call(AT + "generate", name="qwen2", seed=5, tp=2, requests=asked):
            assert [o[:2] for o in result["outputs"]] == [o[:2] for o in expected]


def test_a_rank_holds_its_part_of_weights_and_cache(ranks: World) -> None:
    asked = {"count": 2, "seed": 1, "longest": 4}
    one = make_engine(make_model(MODELS["llama-biases"], 1))
    whole = sum(t.nbytes for t in one._decoder.named_weights().values())
    cache = one._decoder._keys.nbytes + one._decoder._values.nbytes
    for tp in (2, 4):
        for result in ranks.call(AT + "generate", name="llama-biases", seed=1, tp=tp, requests=asked):
            assert result["cache"] == cache / tp
            assert whole / tp <= result["weights"] < whole / tp * 1.1


def test_what_is_said_is_counted(ranks: World) -> None:
    asked = {"count": 4, "seed": 3, "longest": 8}
    found = ranks.call(AT + "generate", name="llama", seed=1, tp=2, requests=asked)
    layers = MODELS["llama"].num_hidden_layers
    for result in found:
        # Embedding, and twice a layer; logits once a pass.
        assert result["calls"]["all_reduce"] == result["calls"]["all_gather"] * (2 * layers + 1)
        assert result["said"] > 0


def test_sleep_and_abort_in_between_change_nothing(ranks: World) -> None:
    asked = {"count": 6, "seed": 21, "longest": 20}
    found = ranks.call(AT + "interrupted", name="qwen3", seed=2, tp=2, requests=asked)
    assert all(result == found[0] for result in found)
    model = make_model(MODELS["qwen3"], 2)
    expected = {tuple(o[0]): o[1] for o in plain(make_engine(model).generate(make_requests(**asked)))}
    for key, ids, _, reason in found[0]:
        assert ids == expected[tuple(key)][: len(ids)]
        assert reason == "abort" or ids == expected[tuple(key)]


def test_all_ranks_have_the_same_bits(ranks: World, seed: int) -> None:
    for tp in (2, 4):
        digests = ranks.call(AT + "digest_of_logits", name="qwen3", seed=seed, tp=tp)
        assert len(set(digests)) == 1


def test_sizes_that_cannot_be_cut_are_refused() -> None:
    class Three(TensorGroup):
        def __init__(self) -> None:
            super().__init__(None)
            self.size = 3

    with pytest.raises(UsageError, match="3 does not divide"):
        TensorParallelEngine(MODELS["llama"], group=Three(), dtype=torch.float32)
