"""An SGLang replica over real HTTP, under the sync manager and a real checkpoint-engine worker."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError, UsageError
from rlctl.rollout.base import Output, Request
from rlctl.rollout.serving import make_served
from rlctl.rollout.sglang.connection import SglangConnection, SglangError
from rlctl.rollout.sglang.requests import model_info
from rlctl.rollout.sglang.served import SglangServed
from rlctl.rollout.sglang.weights import FolderLoader
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, ReplicaLostError
from rlctl.sync.member import described
from rlctl.sync.report import SyncError
from rlctl.sync.states import Ending
from tests.rollout.sglang.house import LONG, House, request
from tests.rollout.sglang.server import EOS, http_server, mark_of, next_token


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("model"))
    yield house
    house.close()


@pytest.mark.parametrize("commit", ["inplace", "staged"])
@pytest.mark.parametrize("how", ["abort", "keep", "wait"])
def test_requests_live_through_a_sync(house: House, how: Any, commit: Any) -> None:
    manager = house.manager(commit=commit, interruption=how)
    first = house.trainer.become(71)
    manager.sync(first)
    asked = [request(ordinal, LONG) for ordinal in range(6)]  # of which four are sent
    house.model.at_most = 5
    house.served.submit(asked)
    house.await_tokens(4)
    flushed = house.model.flushed
    if how == "wait":
        house.go_on()
    assert manager.sync(house.trainer.become(73)).ending is Ending.COMMITTED
    house.go_on()
    assert house.model.flushed == flushed + 1
    outputs = {output.key: output for output in house.outputs(6)}
    for one in asked:
        output = outputs[one.key]
        versions = [segment.version for segment in output.segments]
        sent = one.key.ordinal < 4
        expected = {"abort": [71] if sent else [], "keep": [71, 73] if sent else [73], "wait": [71]}[how]
        assert versions == expected, (one.key, versions)
        assert output.finish_reason == ("abort" if how == "abort" else "length")
        assert (len(output.token_ids) < LONG) == (how == "abort")
        house.assert_true(output, one)
    assert house.served.num_running == 0
    house.served.submit([request(11, 4)])
    assert [segment.version for segment in house.outputs(1)[0].segments] == [73]
    sent_weights = {name: described(name, tensor) for name, tensor in house.trainer.weights.items()}
    assert house.served.digests(None, Deadline(20)) == sent_weights


def test_an_aborted_request_goes_on_where_it_was(house: House) -> None:
    house.manager().sync(house.trainer.become(5))
    whole, other = request(21, LONG), request(22, 40)
    house.model.at_most = 5
    house.served.submit([whole, other])
    house.await_tokens(2)
    house.served.abort([whole.key], Deadline(20))
    house.go_on()
    ended = {output.key: output for output in house.outputs(2)}
    cut = ended[whole.key]
    assert cut.finish_reason == "abort"
    assert len(cut.token_ids) == 6  # an aborted request makes one more
    assert ended[other.key].finish_reason == "length"
    house.manager().sync(house.trainer.become(6))
    house.served.submit([Request(whole.key, whole.prompt_ids, whole.params, whole.seed, tuple(cut.segments))])
    again = house.outputs(1)[0]
    assert again.finish_reason == "length"
    assert len(again.token_ids) == LONG
    assert again.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert [segment.version for segment in again.segments] == [5, 6]
    house.assert_true(again, whole)
    done = Request(whole.key, whole.prompt_ids, whole.params, whole.seed, tuple(again.segments))
    house.served.submit([done])  # a whole response is not sent at all
    assert house.outputs(1)[0].token_ids == again.token_ids


def test_only_the_stop_tokens_of_a_request_end_it(house: House) -> None:
    house.manager().sync(house.trainer.become(8))
    asked = [request(30 + n, 100, stop_token_ids=(50 + n,)) for n in range(8)]
    house.served.submit(asked)
    ended = {output.key: output for output in house.outputs(8)}
    passed = 0
    for one in asked:
        output = ended[one.key]
        house.assert_true(output, one)
        stop = one.params.stop_token_ids[0]
        assert stop not in output.token_ids[:-1]
        assert output.finish_reason == ("stop" if output.token_ids[-1] == stop else "length")
        assert output.finish_reason == "stop" or len(output.token_ids) == 100
        passed += EOS in output.token_ids
    assert passed, "no response has passed the model's own stop token: choose others"


def test_what_the_server_does_not_take_fails_the_sync(house: House) -> None:
    manager = house.manager(interruption="keep")
    manager.sync(house.trainer.become(10))
    house.model.refuses["/update_weights_from_disk"] = "Failed to update weights: a shape"
    try:
        with pytest.raises(SyncError, match="Failed to update weights: a shape"):
            manager.sync(house.trainer.become(11))
    finally:
        house.model.refuses.clear()
    assert house.served.serving is None
    manager.sync(house.trainer.become(12))
    house.trainer.left_out = "model.norm.weight"
    loads = house.model.flushed
    try:
        with pytest.raises(SyncError, match=r"untouched 1 \(model.norm.weight\)"):
            manager.sync(house.trainer.become(13))
    finally:
        house.trainer.left_out = ""
    assert house.model.flushed == loads  # the live weights were not touched
    house.served.submit([request(40, 4)])
    assert house.served.step(timeout=0.1) == []
    manager.sync(house.trainer.become(14))
    assert [segment.version for segment in house.outputs(1)[0].segments] == [14]


def test_memory_is_given_back_and_taken_again(house: House) -> None:
    house.manager().sync(house.trainer.become(20))
    one = request(50, LONG)
    house.model.at_most = 5
    house.served.submit([one])
    house.await_tokens(1)
    house.served.sleep(1, Deadline(20))
    house.go_on()
    assert house.model.away == {"kv_cache"}
    with pytest.raises(RlctlError, match="given up its kv_cache"):
        house.served.resume(20, Deadline(20))
    house.served.wake(["kv_cache"], Deadline(20))
    house.served.resume(20, Deadline(20))
    output = house.outputs(1)[0]
    house.assert_true(output, one)
    assert output.finish_reason == "length"
    house.served.sleep(2, Deadline(20))
    assert house.model.away == {"kv_cache", "weights"}
    house.served.submit([request(51, 3)])
    house.served.wake(["weights", "kv_cache"], Deadline(20))
    with pytest.raises(RlctlError, match="no whole weights"):
        house.served.resume(20, Deadline(20))
    house.manager(interruption="keep").sync(house.trainer.become(21))
    assert [segment.version for segment in house.outputs(1)[0].segments] == [21]
    with pytest.raises(UsageError, match="no memory has the tags"):
        house.served.wake(["graphs"], Deadline(1))


def test_every_wait_has_an_end(house: House) -> None:
    silent = http_server(house.model)  # accepts connections, and nobody answers
    url = f"http://127.0.0.1:{silent.server_port}"
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="/model_info: no answer within"):
        SglangConnection(url).ask(model_info(), Deadline(0.3))
    assert time.monotonic() - begin < 10
    silent.server_close()
    with pytest.raises(ReplicaLostError, match="/model_info"):
        SglangConnection(url).ask(model_info(), Deadline(5))
    with pytest.raises(SglangError, match="401"):
        SglangConnection(house.url, "wrong").ask(model_info(), Deadline(5))
    with pytest.raises(UsageError, match="no address of a server"):
        SglangConnection("localhost:30000")


def test_adapters_follow_each_other(house: House, tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    served = make_served(house.setup(url=house.url, key="secret", adapter=adapter, folder=str(tmp_path)))
    assert isinstance(served, SglangServed)
    (loader,) = served.loaders
    assert isinstance(loader, FolderLoader)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = [
        {name.format("A"): torch.full((2, 16), 0.5 * n), name.format("B"): torch.full((16, 2), 0.25 * n)}
        for n in (1, 3)
    ]
    try:
        with pytest.raises(UsageError, match="no base to add it to"):
            loader.take(factors[0].items(), 30, Deadline(20))
        served.interrupt("abort", 30, Deadline(20))
        house.trainer.become(30)
        both = {**house.trainer.weights, **factors[0]}
        assert loader.take(both.items(), 30, Deadline(20)).complete
        assert list(house.model.adapters) == ["rlctl-30"]
        served.resume(30, Deadline(20))
        one = request(60, 6)
        served.submit([one])
        first = wait_for(served)
        assert [segment.version for segment in first.segments] == [30]
        with pytest.raises(UsageError, match="the adapter that they began with"):
            served.interrupt("keep", 31, Deadline(20))
        served.interrupt("wait", 31, Deadline(20))
        report = loader.take(factors[1].items(), 31, Deadline(20))
        assert report.complete
        assert report.loaded == list(factors[1])
        assert list(house.model.adapters) == ["rlctl-31"]
        served.resume(31, Deadline(20))
        served.submit([one])
        second = wait_for(served)
        assert [segment.version for segment in second.segments] == [31]
        for output, factor in ((first, factors[0]), (second, factors[1])):
            expected = next_token(list(one.prompt_ids), mark_of(house.trainer.weights) + 1 + mark_of(factor))
            assert (output.token_ids[0], output.logprobs[0]) == expected
        assert list(tmp_path.iterdir()) == []  # what was read is gone
    finally:
        served.close()


def wait_for(served: SglangServed) -> Output:
    limit = time.monotonic() + 20
    while not (ended := served.step(timeout=0.5)):
        assert time.monotonic() < limit
    return ended[0]


def test_a_server_of_its_own_starts_and_dies(house: House, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "tests.rollout.sglang.server", "--tick", "0.05"]
    served = make_served(house.setup(command=command, log=str(log), server={"mem-fraction-static": 0.5}))
    assert isinstance(served, SglangServed)
    try:
        assert "fired up" in log.read_text()
        loader = served.loaders[0]
        served.interrupt("abort", 1, Deadline(20))
        assert isinstance(loader, FolderLoader)
        house.trainer.become(1)
        assert loader.take(house.trainer.weights.items(), 1, Deadline(20)).complete
        served.resume(1, Deadline(20))
        short, long = request(70, 4), request(71, LONG)
        served.submit([short])
        house.assert_true(wait_for(served), short)
        before = tuple(wait_for_prefix(served, long).segments)
        served.submit([Request(long.key, long.prompt_ids, long.params, 7, before)])
        server = served._process
        assert server is not None
        child = server._child
        child.kill()
        begin = time.monotonic()
        with pytest.raises(ReplicaLostError):
            wait_for(served)
        assert time.monotonic() - begin < 20
        assert served.progress() in ({}, {long.key: list(before)})
        with pytest.raises(ReplicaLostError):
            served.interrupt("abort", 2, Deadline(20))
    finally:
        served.close()
    failing = [sys.executable, "-c", "print('no such GPU'); raise SystemExit(3)"]
    with pytest.raises(ReplicaLostError, match="exit code 3\nno such GPU"):
        make_served(house.setup(command=failing, log=str(tmp_path / "failed.log"), start_timeout=30))


def wait_for_prefix(served: SglangServed, long: Request) -> Output:
    served.submit([long])
    served.abort(None, Deadline(20))
    return wait_for(served)


def test_options_are_checked(house: House) -> None:
    with pytest.raises(UsageError, match="did you mean 'folder'"):
        make_served(house.setup(url=house.url, foldr="x"))
    with pytest.raises(UsageError, match="pickled"):
        make_served(house.setup(url=house.url, transfer="tensor"))
