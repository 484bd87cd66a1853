"""What vLLM is asked for, without vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.embedded.slots import Pending
from rlctl.rollout.vllm.asking import check_sampling, output_of, sampling, stream_seed
from rlctl.rollout.vllm.environment import PARENT_VARIABLE, set_environment


def request(**params: float) -> Request:
    return Request(RequestKey(3, 1), (1, 2, 3), SamplingParams(10, **params), seed=7)  # type: ignore[arg-type]


def completion(ids: list[int], spans: list[tuple[str, int, int]], reason: str = "length") -> SimpleNamespace:
    versions = [SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans]
    logprobs = SimpleNamespace(logprobs=[-0.1 * i for i in ids])
    return SimpleNamespace(token_ids=ids, logprobs=logprobs, weight_versions=versions, finish_reason=reason)


def test_seeds_tell_everything_apart_that_must_differ() -> None:
    seeds = {
        stream_seed(Request(RequestKey(*key), (1,), SamplingParams(9), seed=seed), position)
        for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (11, 1, 1), (1, 11, 1)) for seed in (0, 1)
        for position in (0, 5)
    }  # fmt: skip
    assert len(seeds) == 24 and min(seeds) >= 0 and max(seeds) < 1 << 63


def test_what_vllm_would_do_otherwise_is_refused() -> None:
    with pytest.raises(UsageError, match=r"temperature 0.01 where 0.001 is asked for"):
        check_sampling(request(temperature=0.001), cuts=True)
    for cut in ({"top_p": 0.5}, {"top_k": 3}):
        with pytest.raises(UsageError, match=r"log-probs after the cut of top_p="):
            check_sampling(request(**cut), cuts=False)
        check_sampling(request(**cut), cuts=True)
        check_sampling(request(temperature=0.0, **cut), cuts=False)


def test_a_prefix_counts_against_the_budget_and_segments_join() -> None:
    pending = Pending(request(), [Segment([5, 6], [-0.5, -0.6], 4, "one")])
    asked = sampling(pending)
    assert asked["max_tokens"] == 8 and asked["seed"] == stream_seed(pending.request, 2)
    output = output_of(pending, completion([7, 8, 9], [("4", 0, 1), ("5", 1, 3)]), "one")
    assert [(s.token_ids, s.version) for s in output.segments] == [([5, 6, 7], 4), ([8, 9], 5)]
    assert output.logprobs == pytest.approx([-0.5, -0.6, -0.7, -0.8, -0.9])
    assert pending.made == 2
    empty = output_of(Pending(request(), []), completion([], [], "abort"), "one")
    assert (empty.segments, empty.finish_reason) == ([], "abort")


def test_a_token_without_a_version_or_an_unknown_end_is_an_error() -> None:
    pending = Pending(request(), [])
    with pytest.raises(RlctlError, match="3 tokens with 3 log-probs"):
        output_of(pending, completion([7, 8, 9], [("4", 0, 2)]), "one")
    with pytest.raises(RlctlError, match="ended a response with 'error'"):
        output_of(pending, completion([7], [("4", 0, 1)], "error"), "one")


def test_the_environment_keeps_what_a_user_set(tmp_path: Path) -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    set_environment(environ, source=str(tmp_path), device="cpu", tensor_parallel=1, threads=1, token="t")  # noqa: S106
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and environ["HF_HUB_OFFLINE"] == "1"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and environ["OMP_NUM_THREADS"] == "1"
    assert environ[PARENT_VARIABLE] == str(os.getpid()) and environ["TORCH_COMPILE_DISABLE"] == "1"
    other: dict[str, str] = {}
    set_environment(other, source="some/model", device="cuda", tensor_parallel=2, threads=0, token="t")  # noqa: S106
    assert "HF_HUB_OFFLINE" not in other and "TORCH_COMPILE_DISABLE" not in other
    assert other["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" and "OMP_NUM_THREADS" not in other
