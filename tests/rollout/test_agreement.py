"""What the engine samples, and the log-probs it records, are those of transformers' own forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlctl.rollout.base import SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from tests.rollout.tiny import EVERY, FUSED, GENERIC, RECURRENT, make_engine, make_model, make_requests, teacher_forced

CASES = [
    *[pytest.param(name, "fused", id=f"fused-{name}") for name in FUSED],
    *[pytest.param(name, "generic", id=f"generic-{name}") for name in EVERY],
]


@pytest.mark.parametrize(("name", "forward"), CASES)
def test_logprobs_equal_the_teacher_forced_forward(name: str, forward: str) -> None:
    model = make_model(EVERY[name], seed=1)
    engine = make_engine(model, forward=forward, max_slots=8)
    # A recurrent model loops over tokens in Python, here and in the reference.
    requests = make_requests(24, seed=2, samples=2, longest=8 if name in RECURRENT else 50)
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.key == request.key
        assert len(output.token_ids) == request.params.max_new_tokens
        expected = teacher_forced(model, request, output)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_both_forwards_sample_the_same_tokens(name: str) -> None:
    model = make_model(FUSED[name], seed=3)
    requests = make_requests(12, seed=4, temperature=0.8, top_p=0.9, top_k=20, longest=40)
    fused, generic = (make_engine(model, forward=f).generate(requests) for f in ("fused", "generic"))
    assert [o.token_ids for o in fused] == [o.token_ids for o in generic]


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_temperature_scales_the_recorded_distribution_and_cuts_do_not(forward: str) -> None:
    model = make_model(FUSED["qwen3"], seed=5)
    engine = make_engine(model, forward=forward)
    for temperature, more in ((0.7, {}), (1.3, {"top_k": 5}), (1.0, {"top_p": 0.5})):
        request = make_requests(1, seed=6, temperature=temperature, **more)[0]
        output = engine.generate([request])[0]
        expected = teacher_forced(model, request, output, temperature)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_greedy_follows_the_most_likely_token(forward: str) -> None:
    model = make_model(FUSED["llama"], seed=7)
    requests = make_requests(6, seed=8, temperature=0.0)
    for request, output in zip(requests, make_engine(model, forward=forward).generate(requests), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == output.token_ids
        expected = teacher_forced(model, request, output)  # recorded at temperature 1
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_a_stop_token_ends_a_response_and_belongs_to_it(forward: str) -> None:
    model = make_model(FUSED["llama"], seed=9)
    engine = make_engine(model, forward=forward, max_slots=6)
    stops = (3, 11, 40)
    requests = make_requests(20, seed=10, stop_token_ids=stops, longest=60)
    reasons = set()
    for request, output in zip(requests, engine.generate(requests), strict=True):
        tokens = output.token_ids
        assert not set(tokens[:-1]) & set(stops)
        assert (tokens[-1] in stops) == (output.finish_reason == "stop")
        if output.finish_reason == "length":
            assert len(tokens) == request.params.max_new_tokens
        reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_bfloat16_stays_near_the_fp32_forward(forward: str) -> None:
    model = make_model(FUSED["qwen3"], seed=11).to(torch.bfloat16)
    engine = make_engine(model, forward=forward, dtype=torch.bfloat16)
    requests = make_requests(8, seed=12)
    for request, output in zip(requests, engine.generate(requests), strict=True):
        gap = (torch.tensor(output.logprobs) - teacher_forced(model, request, output)).abs()
        assert 0 < gap.max() < 0.1


def test_the_fused_forward_is_taken_only_where_it_computes_the_same() -> None:
    for config in FUSED.values():
        assert EmbeddedEngine(config, dtype=torch.float32, max_length=64).forward == "fused"
    for config in GENERIC.values():
        assert EmbeddedEngine(config, dtype=torch.float32, max_length=64).forward == "cached"
    for config in RECURRENT.values():
        assert EmbeddedEngine(config, dtype=torch.float32, max_length=64).forward == "recomputing"


def test_long_responses_cross_every_width_of_the_cache() -> None:
    model = make_model(FUSED["llama"], seed=13)
    engine = make_engine(model, max_length=512)
    requests = [dataclasses.replace(r, params=SamplingParams(300)) for r in make_requests(3, seed=14)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        expected = teacher_forced(model, request, output)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)
