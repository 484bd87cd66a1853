"""Every request that is built, held to the classes of a wheel of SGLang."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.sglang import requests
from rlctl.rollout.sglang.answers import read_generated, segments_of, version_of
from rlctl.rollout.sglang.requests import Call
from rlctl.rollout.sglang.server import server_options
from tests.rollout.sglang.make_schema import classes_in, endpoints_in, options_in
from tests.rollout.sglang.schema import DOCUMENT, faults, faults_of, option_faults

SEED = random.randrange(1 << 30)


def a_request(draw: random.Random) -> Request:
    params = SamplingParams(
        max_new_tokens=draw.randint(8, 64),
        temperature=draw.choice([0.0, 0.7, 1.0]),
        top_p=draw.choice([0.5, 1.0]),
        top_k=draw.choice([0, 20]),
        stop_token_ids=draw.choice([(), (3,), (5, 9)]),
    )
    key = RequestKey(draw.randrange(1000), draw.randrange(8), draw.randrange(3))
    return Request(key, tuple(draw.randrange(60) for _ in range(draw.randint(1, 9))), params, seed=draw.randrange(99))


def every_call() -> list[Call]:
    draw = random.Random(SEED)
    made = [a_request(draw) for _ in range(20)]
    generated = [
        requests.generate(r, range(draw.randint(0, 7)), requests.request_id(r, 2), adapter=draw.choice([None, "a"]))
        for r in made
    ]
    return [
        *generated,
        *(requests.pause(mode) for mode in ("abort", "retract", "in_place")),
        requests.go_on(),
        requests.abort(None),
        requests.abort("1.2.0.0;"),
        requests.release(["weights", "kv_cache"]),
        requests.restore(["kv_cache"]),
        requests.load_folder("/folder", 7),
        requests.load_adapter("a", "/folder"),
        requests.unload_adapter("a"),
        requests.name_version(3),
        requests.read_weight("model.norm.weight", 5),
        requests.model_info(),
        requests.ready(),
    ]


def test_what_is_asked_is_what_sglang_takes() -> None:
    print("seed", SEED)
    for call in every_call():
        method = "GET" if call.body is None else "POST"
        body = None if call.body is None else json.loads(json.dumps(call.body))
        assert faults(call.path, method, body) == [], call


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"input_idz": [1]}, "no field input_idz"),
        ({"input_ids": "text"}, "input_ids"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"lora_path": 3}, "lora_path"),
        ({"rid": [1, 2]}, "rid"),
        ({"stream": 1}, "stream"),
        ({"sampling_params": None}, "SamplingParams: None is no object"),
        ({"sampling_params": {"top_k": 1.5}}, "SamplingParams.top_k"),
        ({"sampling_params": {"max_tokens": 4}}, "no field max_tokens"),
    ],
)
def test_a_wrong_body_is_seen(change: dict[str, Any], fault: str) -> None:
    call = requests.generate(a_request(random.Random(1)), [], "r;")
    assert call.body is not None
    assert any(fault in one for one in faults("/generate", "POST", {**call.body, **change}))


def test_what_is_missing_or_elsewhere_is_seen() -> None:
    assert faults("/update_weights_from_disk", "POST", {}) == ["UpdateWeightFromDiskReqInput needs model_path"]
    assert faults("/pause_generation", "POST", {"mode": "keep"})
    assert faults("/pause_generation", "GET", {})
    assert faults("/pause", "POST", {}) == ["no path /pause"]
    assert faults_of("LoadLoRAAdapterReqInput", {"lora_name": "a"}) == ["LoadLoRAAdapterReqInput needs lora_path"]


def test_the_schema_is_read_from_source() -> None:
    assert DOCUMENT["sglang"] >= "0.5.23"
    fields = classes_in("class A:\n  x: int\nclass B(A):\n  y: Optional[str] = None\n")
    assert fields["B"] == {"x": {"type": "int", "required": True}, "y": {"type": "Optional[str]", "required": False}}
    post = '@app.post("/p")\nasync def f(obj: Annotated[Optional[B], Body()], r: R): ...\n'
    text = post + '@app.get("/g")\nasync def g(): ...\n'
    assert endpoints_in(text) == {"/p": {"methods": ["POST"], "body": "B"}, "/g": {"methods": ["GET"], "body": None}}
    options = options_in(["class S:\n  port: A[int, 'The port.'] = 1\n  path: A[str, Arg(help='x')]\n"])
    assert options == {"path": {"type": "str", "required": True}, "port": {"type": "int", "required": False}}


def test_the_server_is_started_with_options_that_it_has() -> None:
    setup = ReplicaSetup(
        engine="sglang",
        source="/m",
        dtype="bfloat16",
        max_slots=8,
        max_length=128,
        replica="r",
        token="t",  # noqa: S106
    )
    options = server_options(setup, 3000, "key", {"mem_fraction_static": 0.7, "enable-deterministic-inference": True})
    assert option_faults(options) == []
    assert option_faults({**options, "tp-size": "2"})
    assert option_faults({**options, "nothing-known": 1}) == ["ServerArgs has no field nothing_known"]
    with pytest.raises(UsageError, match="api-key of SGLang is set by rlctl"):
        server_options(setup, 3000, "key", {"api-key": "mine"})


def test_noise_follows_the_request_alone() -> None:
    draw = random.Random(SEED)
    made = [a_request(draw) for _ in range(50)]
    seeds = [requests.sampling_seed(request) for request in made]
    assert seeds == [requests.sampling_seed(request) for request in made]
    assert len(set(seeds)) == len({(r.seed, r.key) for r in made})
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_no_id_is_the_beginning_of_another() -> None:
    params = SamplingParams(4)
    ids = [
        requests.request_id(Request(RequestKey(o, s, t), (1,), params, 0), a)
        for o in (0, 1, 10, 11)
        for s in (0, 1, 10)
        for t in (0, 1, 10)
        for a in (0, 1, 10)
    ]
    assert not [(one, two) for one in ids for two in ids if one != two and two.startswith(one)]


@pytest.mark.parametrize("name", ["tensor", "ipc", "distributed", "lora_tensors"])
def test_transfers_that_are_not_used_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"update_weights_from_{name}"):
        requests.require_transfer(name)
    with pytest.raises(UsageError, match="no transfer 'pigeon'"):
        requests.require_transfer("pigeon")


def an_answer(**meta: Any) -> dict[str, Any]:
    drawn = [[-0.5, 7, None], [-0.25, 8, None], [-1.0, 9, None]]
    whole = {"finish_reason": {"type": "length"}, "weight_version": "4", "output_token_logprobs": drawn, "id": "x"}
    return {"text": "", "output_ids": [7, 8, 9], "meta_info": {**whole, **meta}}


def test_versions_become_segments() -> None:
    assert [(s.version, s.token_ids, s.logprobs) for s in segments_of(read_generated(an_answer()), "r")] == [
        (4, [7, 8, 9], [-0.5, -0.25, -1.0])
    ]
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    both = segments_of(read_generated(an_answer(weight_versions=spans)), "r")
    assert [(s.version, s.token_ids, s.replica) for s in both] == [(3, [7, 8], "r"), (4, [9], "r")]
    with pytest.raises(RlctlError, match="do not cover"):
        segments_of(read_generated(an_answer(weight_versions=spans[1:])), "r")
    with pytest.raises(RlctlError, match="'default', which no sync has brought"):
        version_of("default")


def test_an_answer_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(RlctlError, match="other tokens"):
        read_generated({**an_answer(), "output_ids": [7, 8, 1]})
    with pytest.raises(RlctlError, match="3 tokens, and log-probs of 0"):
        read_generated(an_answer(output_token_logprobs=[]))
    with pytest.raises(RlctlError, match="not understood"):
        read_generated({"meta_info": {}})
    aborted = an_answer(output_token_logprobs=[[-0.5, 7, None]], finish_reason={"type": "abort", "message": "Aborted"})
    assert [s.token_ids for s in segments_of(read_generated(aborted), "r")] == [[7]]
