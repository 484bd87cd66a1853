"""Aborting and continuing, and new weights under requests in flight."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request, SamplingParams
from tests.rollout.tiny import EVERY, FUSED, finish, make_engine, make_model, make_requests, teacher_forced

PATHS = [
    ("llama", "fused"),
    ("qwen3", "fused"),
    ("llama", "generic"),
    ("gpt2", "generic"),
    ("mistral-window", "generic"),
]


@pytest.mark.parametrize(("name", "forward"), PATHS)
def test_aborting_and_continuing_gives_the_tokens_of_not_aborting(name: str, forward: str) -> None:
    model = make_model(EVERY[name], seed=40)
    requests = make_requests(20, seed=41, samples=2, longest=40, stop_token_ids=(2,))
    expected = {o.key: o for o in make_engine(model, forward=forward, max_slots=8).generate(requests)}
    rng = random.Random(42)
    engine = make_engine(model, forward=forward, max_slots=8)
    by_key = {r.key: r for r in requests}
    engine.submit(requests)
    found: dict[RequestKey, Output] = {}
    aborts = 0
    while engine.num_running:
        found.update({o.key: o for o in engine.step()})
        if rng.random() < 0.1:
            some = None if rng.random() < 0.3 else rng.sample(requests, 5)
            partial = engine.abort(None if some is None else [r.key for r in some])
            assert all(o.finish_reason == "abort" for o in partial)
            aborts += len(partial)
            engine.submit([replace(by_key[o.key], prefix=tuple(o.segments)) for o in partial])
    assert aborts > 20
    for key, output in found.items():
        assert output.token_ids == expected[key].token_ids
        assert output.finish_reason == expected[key].finish_reason
        assert len(output.segments) == 1  # one version, one replica
        got, want = torch.tensor(output.logprobs), torch.tensor(expected[key].logprobs)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_continuing_a_whole_response_ends_at_once() -> None:
    engine = make_engine(make_model(FUSED["llama"], seed=43))
    key, prompt = RequestKey(0, 0), (1, 2, 3)
    full = Segment([4, 5], [-1.0, -2.0])
    engine.submit([Request(key, prompt, SamplingParams(2), 0, (full,))])
    assert engine.num_running == 1
    assert engine.step() == [Output(key, [full], "length")]
    engine.submit([Request(key, prompt, SamplingParams(9, stop_token_ids=(5,)), 0, (full,))])
    assert engine.step() == [Output(key, [full], "stop")]
    assert engine.num_running == 0


def test_abort_returns_running_and_waiting_requests_and_only_those_named() -> None:
    engine = make_engine(make_model(FUSED["llama"], seed=44), max_slots=2)
    requests = [Request(RequestKey(i, 0), (1 + i,), SamplingParams(20), 0) for i in range(4)]
    engine.submit(requests)
    for _ in range(5):
        assert engine.step() == []
    partial = {o.key: o for o in engine.abort([requests[0].key, requests[3].key, RequestKey(99, 0)])}
    assert set(partial) == {requests[0].key, requests[3].key}
    assert len(partial[requests[0].key].token_ids) == 5
    assert partial[requests[3].key].segments == []
    assert {o.key for o in finish(engine)} == {requests[1].key, requests[2].key}


@pytest.mark.parametrize(("name", "forward"), PATHS)
def test_new_weights_under_requests_in_flight_begin_a_segment(name: str, forward: str) -> None:
    config = EVERY[name]
    old, new = make_model(config, seed=45), make_model(config, seed=46)
    engine = make_engine(old, forward=forward, max_slots=6, replica="a")
    requests = [replace(r, params=SamplingParams(30)) for r in make_requests(10, seed=47, samples=2)]
    engine.submit(requests)
    found = {}
    for _ in range(12):
        found.update({o.key: o for o in engine.step()})
    assert engine.version == 0
    assert engine.load_weights(new.state_dict().items(), 7).complete
    assert engine.version == 7
    found.update({o.key: o for o in finish(engine)})
    spanning = 0
    for request in requests:
        output = found[request.key]
        versions = [(s.version, s.replica) for s in output.segments]
        assert versions in ([(0, "a"), (7, "a")], [(7, "a")])
        spanning += len(versions) == 2
        before = len(output.segments[0].token_ids) if len(versions) == 2 else 0
        assert before in (0, 12)
        by_old, by_new = (teacher_forced(m, request, output) for m in (old, new))
        # The new weights see the old tokens through a cache of their own, not one of the old weights.
        expected = torch.cat((by_old[:before], by_new[before:]))
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)
        assert (by_old - by_new).abs().max() > 0.1
    assert spanning == 6


def test_segments_of_other_replicas_and_versions_stay_apart_when_continued() -> None:
    model = make_model(FUSED["llama"], seed=48)
    request = Request(RequestKey(0, 0), (5, 6), SamplingParams(12), 3)
    whole = make_engine(model).generate([request])[0]
    pieces: tuple[Segment, ...] = ()
    for replica in ("a", "b", "b", "c"):
        engine = make_engine(model, replica=replica)
        engine.submit([replace(request, prefix=pieces)])
        for _ in range(2):
            engine.step()
        pieces = tuple(engine.abort()[0].segments)
    output = make_engine(model, replica="c").generate([replace(request, prefix=pieces)])[0]
    assert [(s.replica, len(s.token_ids)) for s in output.segments] == [("a", 2), ("b", 4), ("c", 6)]
    assert output.token_ids == whole.token_ids
    assert [s.replica for s in pieces] == ["a", "b", "c"]
    assert len(pieces[-1].token_ids) == 2  # the request's own segments were not written to
