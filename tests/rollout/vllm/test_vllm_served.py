"""vLLM as a replica: requests, weight versions, interruptions, sleep, and deaths."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError
from rlctl.sync.member import described
from tests.rollout.vllm.served_house import ServedHouse, stale_plugin
from tests.rollout.vllm.tiny_engines import PROMPT, TinyModel
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with stale_plugin(tmp_path_factory.mktemp("plugin")) as switch:
        yield switch


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, switch: Path) -> Iterator[ServedHouse]:
    house = ServedHouse(tmp_path_factory.mktemp("vllm"), options={"kv_cache_memory_bytes": 64 << 20})
    try:
        yield house
    finally:
        house.close()


def versions_of(output: Output) -> set[int]:
    return {segment.version for segment in output.segments}


def test_requests_wait_for_the_first_weights(house: ServedHouse) -> None:
    assert house.replica.serving is None
    request = house.request(5)
    house.replica.submit([request])
    version = house.sync(interruption="keep")
    assert house.replica.serving == version == 1
    (output,) = house.outputs(request)
    (segment,) = output.segments
    assert (segment.version, segment.replica, output.finish_reason) == (1, "one", "length")
    assert len(segment.token_ids) == 5 and house.gap(request, output).max() < 1e-5


def test_logprobs_are_those_before_every_cut(house: ServedHouse) -> None:
    house.sync()
    params = [
        {"temperature": 0}, {}, {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8}, {"top_k": 5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20}, {"temperature": 0, "top_p": 0.5, "top_k": 2},
    ]  # fmt: skip
    requests = [house.request(30, **more) for more in params]
    outputs = house.ask(*requests)
    for request, output in zip(requests, outputs, strict=True):
        assert house.gap(request, output).max() < 1e-5, request.params
    assert outputs[0].token_ids == outputs[-1].token_ids  # both greedy
    ids = outputs[4].token_ids
    logits = house.model.logits(list(PROMPT), ids)
    assert (logits >= logits.gather(1, torch.tensor(ids)[:, None])).sum(1).max() <= 5


def test_noise_hangs_on_the_run_and_the_request_alone(house: ServedHouse) -> None:
    house.sync()
    requests = [house.request(24, key=RequestKey(1000, sample)) for sample in range(6)]
    together = [output.token_ids for output in house.ask(*requests)]
    assert len({tuple(ids) for ids in together}) == 6
    assert [house.ask(request)[0].token_ids for request in requests] == together


def test_stop_tokens_end_a_response_and_are_part_of_it(house: ServedHouse) -> None:
    house.sync()
    whole = house.request(40)
    ids = house.ask(whole)[0].token_ids
    stop, other = ids[random.randrange(5, 30)], next(token for token in range(300) if token not in ids)
    print("stop", stop)
    (output,) = house.ask(house.request(40, key=whole.key, stop_token_ids=(other, stop)))
    assert output.finish_reason == "stop" and output.token_ids == ids[: ids.index(stop) + 1]


def test_an_aborted_response_goes_on_from_its_tokens(house: ServedHouse) -> None:
    house.sync()
    request, other = house.request(300), house.request(300)
    house.replica.submit([request, other])
    house.wait_for_tokens(request, other)
    house.replica.abort([request.key, RequestKey(77, 7)], deadline=Deadline(20))
    (part,) = house.outputs(request)
    assert part.finish_reason == "abort" and 0 < len(part.token_ids) < 300 and house.gap(request, part).max() < 1e-5
    house.replica.abort(deadline=Deadline(20))
    assert house.outputs(other)[0].finish_reason == "abort" and house.replica.unfinished() == []
    version = house.sync()
    (whole,) = house.ask(replace(request, prefix=tuple(part.segments)))
    made = len(part.token_ids)
    assert len(whole.token_ids) == 300 and whole.token_ids[:made] == part.token_ids
    assert [segment.version for segment in whole.segments] == [version - 1, version]
    assert whole.logprobs[:made] == part.logprobs and house.gap(request, whole)[made:].max() < 1e-5
    # What has ended already is returned as it is.
    (same,) = house.ask(replace(request, prefix=tuple(whole.segments)))
    assert same.segments == whole.segments and same.finish_reason == "length"


@pytest.mark.parametrize("how", ["abort", "wait", "keep"])
def test_interruptions(house: ServedHouse, how: str) -> None:
    old = house.sync()
    before = TinyModel()
    before.become(old)
    requests = [house.request(340) for _ in range(3)]
    house.replica.submit(requests)
    house.wait_for_tokens(*requests)
    new = house.sync(interruption=how)
    for request, output in zip(requests, house.outputs(*requests), strict=True):
        made = len(output.segments[0].token_ids)
        assert output.segments[0].version == old and house.gap(request, output, before)[:made].max() < 1e-5
        if how == "keep":
            assert versions_of(output) == {old, new} and len(output.token_ids) == 340
            # Keys and values are computed anew: not one of the old weights is left.
            assert house.gap(request, output)[made:].max() < 1e-5
        else:
            assert versions_of(output) == {old}
            assert (output.finish_reason, made < 340) == (("abort", True) if how == "abort" else ("length", False))
    house.assert_serves()  # the prompt is longer than a block: keys and values of old weights would be seen


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nixl", marks=pytest.mark.nixl), pytest.param("mooncake", marks=pytest.mark.mooncake), "ipc"],
)
def test_weights_come_through_every_checkpoint_engine(house: ServedHouse, backend: str) -> None:
    house.use(backend)
    for _ in range(2):
        house.sync()
        house.assert_serves()
    due = {name: described(name, tensor) for name, tensor in house.model.tensors().items()}
    assert house.replica.digests(None, Deadline(20)) == due


def test_a_stale_cache_and_a_dropped_update_show_in_the_logprobs(house: ServedHouse, switch: Path) -> None:
    house.sync()
    house.assert_serves()
    with house.stale_cache(switch):
        house.sync()
        request = house.request(8)
        assert house.gap(request, house.ask(request)[0]).max() > 1e-3
    house.sync()
    house.assert_serves()
    house.model.become(-1)  # as if the last update had never come
    request = house.request(8)
    assert house.gap(request, house.ask(request)[0]).max() > 1e-3


def resident(house: ServedHouse) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in house.engine_pids()) >> 20


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back(house: ServedHouse, level: int) -> None:
    version = house.sync()
    house.ask(*(house.request(340) for _ in range(8)))  # touches the pages of the cache
    running = house.request(340)
    house.replica.submit([running])
    awake = resident(house)
    house.replica.sleep(level, Deadline(20))
    asleep = resident(house)
    print("MiB awake", awake, "asleep", asleep)
    assert house.replica.serving is None and awake - asleep >= 5
    if level == 2:
        with pytest.raises(RlctlError, match="weights are asleep"):
            house.replica.digests(None, Deadline(20))
    house.replica.wake(("weights",), Deadline(20))
    house.replica.wake(("kv_cache",), Deadline(20))
    if level == 1:
        house.replica.resume(version, Deadline(20))
    else:
        with pytest.raises(RlctlError, match="hold versions"):
            house.replica.resume(version, Deadline(20))
        house.sync(interruption="keep")
    (output,) = house.outputs(running)
    assert len(output.token_ids) == 340
    house.assert_serves()
    due = {name: described(name, tensor) for name, tensor in house.model.tensors().items()}
    assert house.replica.digests(None, Deadline(20)) == due


@pytest.mark.slow
def test_a_replica_begins_anew_and_its_engine_ends_with_it(house: ServedHouse) -> None:
    house.sync()
    request = house.request(340)
    house.replica.submit([request])
    house.wait_for_tokens(request)
    (engine,) = house.engine_pids()
    os.kill(house.replica.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(engine), "the end of its engine")
    until(lambda: house.replica.lost, "the loss")
    (left,) = house.replica.unfinished()
    house.replica.restart(Deadline(300))
    house.sync()
    assert len(house.ask(left)[0].token_ids) == 340
    house.assert_serves()


def test_the_death_of_the_engine_is_that_of_the_replica(house: ServedHouse) -> None:
    house.sync()
    request = house.request(340)
    house.replica.submit([request])
    house.wait_for_tokens(request)
    (engine,) = house.engine_pids()
    for pid in (engine, house.replica.pid):
        os.kill(pid, signal.SIGTERM)  # as Slurm tells every process of a job, before the run has ended it
    assert house.outputs(request)[0].finish_reason == "length"
    house.assert_serves()
    request = house.request(340)
    house.replica.submit([request])
    house.wait_for_tokens(request)
    begin = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    until(lambda: house.replica.lost, "the loss")
    assert time.monotonic() - begin < 10
    assert "engine process of replica one is gone" in house.losses[-1] and "SIGKILL" in house.losses[-1]
    assert house.replica.serving is None
    (left,) = house.replica.unfinished()
    assert left.key == request.key and left.prefix[0].token_ids
    with pytest.raises(ReplicaLostError, match="engine process"):
        house.replica.submit([request])
