"""A request's tokens and log-probs depend on the request and the weights alone, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch

from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.engine import EmbeddedEngine
from tests.rollout.tiny import EVERY, FUSED, GENERIC, RECURRENT, finish, make_engine, make_model, make_requests


def _arrive_at_random(engine: EmbeddedEngine, requests: list[Request], rng: random.Random) -> dict[tuple, Output]:
    """Submit in random order, some at once and some while others run."""
    order = requests.copy()
    rng.shuffle(order)
    found = {}
    while order or engine.num_running:
        if order and rng.random() < 0.3:
            take = rng.randint(1, 12)
            engine.submit(order[:take])
            del order[:take]
        found.update({o.key: o for o in engine.step()})
    return found


FUSED_IN_TWO_TYPES = [
    *[pytest.param(name, torch.float32, id=f"{name}-fp32") for name in FUSED],
    pytest.param("qwen3", torch.bfloat16, id="qwen3-bf16"),
]


@pytest.mark.parametrize(("name", "dtype"), FUSED_IN_TWO_TYPES)
def test_fused_bits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    model = make_model(FUSED[name], seed=20)
    requests = make_requests(24, seed=21, samples=3, longest=110)
    alone = [make_engine(model, dtype=dtype, max_slots=1).generate([r])[0] for r in requests[::7]]
    reference = make_engine(model, dtype=dtype, max_slots=64).generate(requests)
    assert reference[::7] == alone
    for seed in range(2):
        rng = random.Random(seed)
        engine = make_engine(model, dtype=dtype, max_slots=rng.choice([2, 5, 17, 33]))
        found = _arrive_at_random(engine, requests, rng)
        assert [found[r.key] for r in requests] == reference, f"{seed=}"


def test_fused_bits_do_not_depend_on_the_number_of_threads() -> None:
    model = make_model(FUSED["llama-head-dim"], seed=32)
    requests = make_requests(20, seed=33, samples=2, longest=30)
    reference = make_engine(model, max_slots=64).generate(requests)
    torch.set_num_threads(2)
    for slots in (1, 3, 11, 64):
        assert make_engine(model, max_slots=slots).generate(requests) == reference, f"{slots=}"


def test_fused_bits_do_not_depend_on_long_neighbours() -> None:
    model = make_model(FUSED["llama-head-dim"], seed=22)  # six query heads to one kv head: blocked products
    short, long = make_requests(6, seed=23, longest=200), make_requests(8, seed=24, longest=450)
    long = [Request(r.key._replace(turn=1), r.prompt_ids, r.params, r.seed) for r in long]
    reference = make_engine(model, max_length=512).generate(short)
    mixed = make_engine(model, max_length=512).generate([*long, *short])
    assert mixed[len(long) :] == reference


@pytest.mark.parametrize("name", ["qwen2", *GENERIC, *RECURRENT])
def test_generic_tokens_do_not_depend_on_the_batch(name: str) -> None:
    model = make_model(EVERY[name], seed=25)
    requests = make_requests(16, seed=26, samples=2, longest=8 if name in RECURRENT else 40)
    reference = make_engine(model, forward="generic").generate(requests)
    rng = random.Random(27)
    found = _arrive_at_random(make_engine(model, forward="generic", max_slots=5), requests, rng)
    for request, expected in zip(requests, reference, strict=True):
        assert found[request.key].token_ids == expected.token_ids
        got, want = torch.tensor(found[request.key].logprobs), torch.tensor(expected.logprobs)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_sampling_parameters_of_neighbours_do_not_matter(forward: str) -> None:
    model = make_model(FUSED["llama"], seed=28)
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.8},
        {"top_k": 4},
        {"stop_token_ids": (5, 6, 7)},
    ]
    requests = []
    for turn, kind in enumerate(kinds):
        some = make_requests(6, seed=29, longest=40, **kind)
        requests.extend(Request(r.key._replace(turn=turn), r.prompt_ids, r.params, r.seed) for r in some)
    apart = [make_engine(model, forward=forward).generate(requests[i : i + 6]) for i in range(0, len(requests), 6)]
    together = make_engine(model, forward=forward, max_slots=7).generate(requests)
    for got, want in zip(together, [o for outputs in apart for o in outputs], strict=True):
        assert got.token_ids == want.token_ids
        assert got == want or forward == "generic"


def test_a_group_is_prefilled_once_also_across_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(FUSED["llama"], seed=30)
    engine = make_engine(model, max_slots=6)
    requests = make_requests(40, seed=31, samples=8, longest=30)
    seen: list[tuple[int, ...]] = []
    prefill = engine._decoder.prefill

    def counting(sequences):
        seen.extend(sequences)
        return prefill(sequences)

    monkeypatch.setattr(engine._decoder, "prefill", counting)
    engine.submit(requests)
    finish(engine)
    assert sorted(seen) == sorted({r.prompt_ids for r in requests})
