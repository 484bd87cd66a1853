"""Loading, sleeping, waking, and what the engine refuses."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request, RolloutEngine, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.registry import ROLLOUT_ENGINES
from tests.rollout.tiny import EVERY, FUSED, VOCAB, finish, make_engine, make_model, make_requests

FORWARDS = ["fused", "generic"]


def test_the_table_names_the_embedded_engine_and_suggests() -> None:
    assert ROLLOUT_ENGINES.load("transformers") is EmbeddedEngine
    assert issubclass(EmbeddedEngine, RolloutEngine)
    with pytest.raises(UsageError, match="did you mean 'transformers'"):
        ROLLOUT_ENGINES.load("transformer")


@pytest.mark.parametrize("name", EVERY)
def test_names_and_shapes_are_those_of_the_transformers_model(name: str) -> None:
    config = EVERY[name]
    model = make_model(config, seed=50)
    for forward in FORWARDS if name in FUSED else ["generic"]:
        engine = EmbeddedEngine(config, dtype=torch.float32, max_length=64, forward=forward)
        assert engine.version is None
        stream = [*model.named_parameters(), ("model.layers.9.nothing", torch.zeros(3))]
        report = engine.load_weights(stream, 4)
        assert report.loaded == [n for n, _ in model.named_parameters()]
        assert report.unknown == ["model.layers.9.nothing"]
        assert report.untouched == []
        assert not report.complete
        assert engine.version == 4


@pytest.mark.parametrize("forward", FORWARDS)
def test_nothing_is_generated_before_every_weight_came(forward: str) -> None:
    model = make_model(FUSED["llama"], seed=51)
    engine = make_engine(model, load=False, forward=forward)
    request = make_requests(1, seed=52)
    with pytest.raises(RlctlError, match="no weights"):
        engine.generate(request)
    names = dict(model.named_parameters())
    last = names.popitem()
    report = engine.load_weights(names.items(), 1)
    assert report.untouched == [last[0]]
    assert engine.version is None
    with pytest.raises(RlctlError, match=last[0]):
        engine.generate(request)
    engine.load_weights([last], 1)
    assert engine.version == 1
    expected = make_engine(model, forward=forward).generate(request)[0]
    assert engine.generate(request)[0].token_ids == expected.token_ids


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_stream_that_breaks_leaves_an_engine_that_refuses(forward: str) -> None:
    model = make_model(FUSED["llama"], seed=53)
    engine = make_engine(model, forward=forward)
    request = make_requests(1, seed=54)
    expected = engine.generate(request)

    def broken():
        yield from list(model.state_dict().items())[:3]
        raise ConnectionError("the peer is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(broken(), 1)
    assert engine.version is None
    with pytest.raises(RlctlError, match="no weights"):
        engine.step()
    engine.load_weights(model.state_dict().items(), 0)
    assert engine.generate(request) == expected
    with pytest.raises(RlctlError, match=r"shape \[2\].*shape|has shape"):
        engine.load_weights([("model.norm.weight", torch.zeros(2))], 1)


@pytest.mark.parametrize("forward", FORWARDS)
def test_sleep_and_staged_wake(forward: str) -> None:
    model = make_model(FUSED["qwen3"], seed=55)
    requests = make_requests(12, seed=56, longest=30)
    expected = {o.key: o.token_ids for o in make_engine(model, forward=forward, max_slots=4).generate(requests)}
    engine = make_engine(model, forward=forward, max_slots=4)
    engine.submit(requests)
    found = {}

    def some_steps() -> None:
        for _ in range(7):
            found.update({o.key: o.token_ids for o in engine.step()})

    some_steps()
    engine.sleep(1)
    with pytest.raises(RlctlError, match="asleep: kv_cache"):
        engine.step()
    engine.wake()
    some_steps()  # requests in flight went on from where they were
    engine.sleep(2)
    with pytest.raises(RlctlError, match="asleep: weights, kv_cache"):
        engine.generate([])
    with pytest.raises(RlctlError, match="asleep"):
        engine.load_weights(model.state_dict().items(), 0)
    engine.wake(["weights"])
    with pytest.raises(RlctlError, match="asleep: kv_cache"):
        engine.step()
    assert engine.load_weights(model.state_dict().items(), 0).complete
    engine.wake(["kv_cache"])
    found.update({o.key: o.token_ids for o in finish(engine)})
    assert found == expected
    engine.sleep(2)
    engine.wake()
    with pytest.raises(RlctlError, match="no weights"):  # never what memory happens to hold
        engine.step()


@pytest.mark.parametrize("forward", FORWARDS)
def test_sleep_gives_memory_back_to_the_system(forward: str) -> None:
    config = LlamaConfig(
        vocab_size=20000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    engine = EmbeddedEngine(config, dtype=torch.float32, max_slots=32, max_length=400, forward=forward)
    state = dict(make_model(config, seed=57).to(torch.bfloat16).named_parameters())
    weights = 4 * sum(p.numel() for p in state.values())
    engine.load_weights(state.items(), 0)
    # One prompt for all rows: the cache is full, and computing it is cheap.
    engine.submit([Request(RequestKey(0, i), tuple(range(390)), SamplingParams(5), 0) for i in range(32)])
    engine.step()
    cache = 2 * 2 * 8 * 64 * 32 * 390 * 4
    resident = []
    for act in (lambda: None, lambda: engine.sleep(1), lambda: engine.sleep(2)):
        act()
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    assert resident[0] - resident[1] > 0.9 * cache, f"{resident=} {cache=}"
    assert resident[1] - resident[2] > 0.9 * weights, f"{resident=} {weights=}"


def test_requests_that_cannot_be_served_are_refused_and_none_is_queued() -> None:
    engine = make_engine(make_model(FUSED["llama"], seed=58), max_length=32)
    good = Request(RequestKey(0, 0), (1,), SamplingParams(4), 0)
    for bad, message in (
        (Request(RequestKey(1, 0), (), SamplingParams(4), 0), "empty"),
        (Request(RequestKey(1, 0), (VOCAB,), SamplingParams(4), 0), "outside"),
        (Request(RequestKey(1, 0), (-1,), SamplingParams(4), 0), "outside"),
        (Request(RequestKey(1, 0), (1,) * 30, SamplingParams(3), 0), "max_length 32"),
        (Request(RequestKey(0, 0), (1,), SamplingParams(4), 0), "in flight"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.submit([good, bad])
        assert engine.num_running == 0
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(UsageError):
            SamplingParams(4, **wrong)
    with pytest.raises(UsageError):
        SamplingParams(0)


def test_weights_that_are_not_finite_are_an_error_and_not_a_token() -> None:
    model = make_model(FUSED["llama"], seed=59)
    engine = make_engine(model)
    request = make_requests(3, seed=60)
    expected = engine.generate(request)
    engine.load_weights([("model.norm.weight", torch.full((48,), float("nan")))], 1)
    with pytest.raises(RlctlError, match="not finite"):
        engine.generate(request)
    engine.load_weights(model.state_dict().items(), 0)  # in flight still, and whole again
    assert {o.key: o.token_ids for o in finish(engine)} == {o.key: o.token_ids for o in expected}


def test_generate_leaves_the_outputs_of_other_requests_to_step() -> None:
    engine = make_engine(make_model(FUSED["llama"], seed=61))
    first = Request(RequestKey(0, 0), (1,), SamplingParams(3), 0)
    second = Request(RequestKey(1, 0), (2,), SamplingParams(9), 0)
    engine.submit([first])
    assert [o.key for o in engine.generate([second])] == [second.key]
    assert engine.num_running == 1
    assert [o.key for o in engine.step()] == [first.key]
    assert engine.num_running == 0


def test_a_folder_is_read_for_its_configuration_only(tmp_path: Path) -> None:
    model = make_model(FUSED["qwen2"], seed=62)
    model.config.save_pretrained(tmp_path)
    engine = EmbeddedEngine(tmp_path, dtype=torch.float32, max_length=64)
    assert engine.load_weights(model.state_dict().items(), 0).complete
    assert engine.generate(make_requests(2, seed=63, longest=20))
    with pytest.raises(UsageError, match="no folder"):
        EmbeddedEngine(tmp_path / "absent", dtype=torch.float32)
    with pytest.raises(UsageError, match="positions"):
        EmbeddedEngine(tmp_path, dtype=torch.float32, max_length=513)


def test_a_closed_engine_says_so() -> None:
    engine = make_engine(make_model(FUSED["llama"], seed=64))
    engine.close()
    engine.close()
    with pytest.raises(RlctlError, match="closed"):
        engine.step()
