"""Replicas in processes of their own: requests, syncs, interruptions, deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import pytest

from rlctl.errors import UsageError
from rlctl.experience.segments import RequestKey
from rlctl.process import start
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.remote.replica import RemoteReplica
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError
from rlctl.sync.member import described
from rlctl.sync.protocols import Interruption
from rlctl.sync.states import Ending
from tests.rollout.remote.house import (
    BAD_KEY,
    SECONDS,
    START_SECONDS,
    Ear,
    House,
    a_seed,
    alone,
    assert_same,
    assert_told_true,
    begun,
    long_requests,
    setup_of,
    strike,
)
from tests.rollout.tiny import make_requests
from tests.waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[RemoteReplica]]:
    made = begun([setup_of(folder, "a"), setup_of(folder, "b")], output=folder / "log")
    yield made
    for client in made:
        client.close()


@pytest.fixture(scope="module")
def house(replicas: list[RemoteReplica]) -> Iterator[House]:
    house = House(replicas, "ipc")
    yield house
    house.close()


def test_tokens_are_those_of_an_engine_in_one_process(house: House) -> None:
    version = house.trainer.become(seed := a_seed())
    assert house.manager().sync(version).ending is Ending.COMMITTED
    requests = make_requests(24, seed, samples=2, temperature=0.9, stop_token_ids=(3,))
    ears = [Ear(client) for client in house.replicas]
    halves = requests[::2], requests[1::2]
    for client, half in zip(house.replicas, halves, strict=True):
        assert client.serving == version
        client.submit(half)
    found = [output for ear, half in zip(ears, halves, strict=True) for output in ear.take(len(half))]
    found.sort(key=lambda output: output.key)
    assert_same(found, alone(house.trainer.model, requests, version=version))
    assert {(s.version, s.replica) for o in found for s in o.segments} == {(version, "a"), (version, "b")}
    sent = {name: described(name, p) for name, p in house.trainer.per_tensor_params()}
    assert [client.digests(None, Deadline(20)) for client in house.replicas] == [sent] * 2
    assert [client.unfinished() for client in house.replicas] == [[]] * 2


def live_through_a_sync(house: House, how: Interruption) -> None:
    first = house.trainer.become(seed := a_seed())
    models = {first: house.trainer.model}
    manager = house.manager(interruption=how)
    manager.sync(first)
    second = house.trainer.become(seed + 1)
    models[second] = house.trainer.model
    requests = long_requests(6, seed)
    here, there = house.replicas
    ear, other_ear = Ear(here), Ear(there)
    here.submit(requests)
    until(lambda: any(r.prefix for r in here.unfinished()), "something was made")
    assert manager.sync(second).ending is Ending.COMMITTED
    outputs = ear.take(len(requests))
    cut = [output for output in outputs if output.finish_reason == "abort"]
    assert bool(cut) == (how == "abort")
    if how == "keep":
        assert any([s.version for s in output.segments] == [first, second] for output in outputs)
    if how == "abort":
        assert {segment.version for output in outputs for segment in output.segments} == {first}
    by_key = {request.key: request for request in requests}
    there.submit([replace(by_key[output.key], prefix=tuple(output.segments)) for output in cut])
    whole = [output for output in outputs if output.finish_reason != "abort"] + other_ear.take(len(cut))
    assert [len(o.token_ids) - by_key[o.key].params.max_new_tokens for o in whole] == [0] * len(requests)
    assert_told_true(whole, requests, models)
    if how == "wait":  # four were at work, two had no slot yet: those that run end first
        assert all(len(output.segments) == 1 for output in whole)


@pytest.mark.parametrize("how", ["abort", "keep", "wait"])
def test_requests_live_through_a_sync(house: House, how: Interruption) -> None:
    live_through_a_sync(house, how)


@pytest.mark.slow
def test_weights_over_gloo(replicas: list[RemoteReplica]) -> None:
    house = House(replicas, "gloo")
    live_through_a_sync(house, "keep")
    house.close()


def test_some_are_aborted_and_the_others_go_on(house: House) -> None:
    version = house.trainer.become(seed := a_seed())
    house.manager().sync(version)
    client = house.replicas[1]
    ear = Ear(client)
    requests = long_requests(12, seed)  # more than there are slots
    client.submit(requests)
    gone = {requests[0].key, requests[11].key, RequestKey(4711, 0)}
    client.abort(gone, deadline=Deadline(20))
    outputs = ear.take(12)
    assert {output.key for output in outputs if output.finish_reason == "abort"} == gone - {RequestKey(4711, 0)}
    expected = {output.key: output for output in alone(house.trainer.model, requests, version=version)}
    for output in outputs:
        assert output.token_ids == expected[output.key].token_ids[: len(output.token_ids)]
        assert output.finish_reason in ("abort", expected[output.key].finish_reason)


def test_memory_is_given_up_and_comes_back_with_the_next_sync(house: House) -> None:
    first = house.trainer.become(seed := a_seed())
    manager = house.manager(interruption="keep")
    manager.sync(first)
    models = {first: house.trainer.model}
    client, ear = house.replicas[0], Ear(house.replicas[0])
    requests = long_requests(3, seed)
    client.submit(requests)
    until(lambda: any(r.prefix for r in client.unfinished()), "something was made")
    client.sleep(2, Deadline(20))
    assert client.serving is None
    client.submit(more := [replace(r, key=RequestKey(r.key.ordinal, 7)) for r in requests])
    client.wake(("weights",), Deadline(20))
    second = house.trainer.become(seed + 1)
    models[second] = house.trainer.model
    manager.sync(second)
    outputs = ear.take(6)
    assert_told_true(outputs, requests + more, models)
    assert {s.version for output in outputs if output.key.sample == 7 for s in output.segments} == {second}
    client.sleep(1, Deadline(20))
    client.wake(("kv_cache",), Deadline(20))
    client.resume(second, Deadline(20))
    client.submit(requests[:1])
    assert_same(ear.take(1), alone(house.trainer.model, requests[:1], version=second))


def test_what_cannot_be_served_is_refused_and_errors_keep_their_type(house: House) -> None:
    version = house.trainer.become(a_seed())
    house.manager().sync(version)
    client, ear = house.replicas[0], Ear(house.replicas[0])
    good = Request(RequestKey(0, 0), (1, 2, 3), SamplingParams(4), seed=1)
    for bad, reason in [
        (replace(good, key=RequestKey(1, 0), prompt_ids=()), "empty"),
        (good, "in flight"),
        (replace(good, key=RequestKey(1, 0), prompt_ids=(1,) * 253), "exceed"),
    ]:
        with pytest.raises(UsageError, match=reason):
            client.submit([good, bad])
    assert client.unfinished() == []
    with pytest.raises(UsageError, match="sleep level is 3"):
        client.sleep(3, Deadline(inf))
    client.resume(version, Deadline(20))
    client.submit([good])
    assert len(ear.take(1)) == 1


@pytest.mark.parametrize(
    "how", ["killed", pytest.param("stopped", marks=pytest.mark.slow), pytest.param("broken", marks=pytest.mark.slow)]
)
def test_what_a_dead_replica_had_goes_on_with_another(house: House, how: str) -> None:
    a, b = house.replicas
    manager = house.manager()
    version = house.trainer.become(seed := a_seed())
    if how == "stopped":
        a.silence = 3.0
        a.kill("to begin anew")
        until(lambda: a.lost, "the death is known")
        a.restart(Deadline(START_SECONDS))
    manager.sync(version)
    ear, other_ear = Ear(a), Ear(b)
    requests = long_requests(9, seed)
    a.submit(requests)
    until(lambda: any(r.prefix for r in a.unfinished()), "something was made")
    reason = strike(a, how)
    until(lambda: ear.losses, "the death is told")
    assert reason in ear.losses[0]
    for act in (lambda: a.submit(requests), lambda: a.digests(None, Deadline(20)), lambda: a.sleep(1, Deadline(20))):
        with pytest.raises(ReplicaLostError, match="replica a is lost"):
            act()
    a.fence("it is dead")
    assert a.serving is None
    rest, ended = [r for r in a.unfinished() if r.key != BAD_KEY], ear.outputs
    assert sorted([*(r.key for r in rest), *(o.key for o in ended)]) == sorted(r.key for r in requests)
    assert any(r.prefix for r in rest)
    b.submit(rest)
    whole = sorted([*ended, *other_ear.take(len(rest))], key=lambda output: output.key)
    assert_told_true(whole, requests, {version: house.trainer.model})
    expected = alone(house.trainer.model, requests, version=version)
    assert [output.token_ids for output in whole] == [output.token_ids for output in expected]
    assert len(ear.losses) == 1
    # The next sync leaves it out; a fresh process takes its place, and the one after brings it back.
    manager.lost("a", a.lost)
    second = house.trainer.become(seed + 1)
    report = manager.sync(second)
    assert (list(report.fenced), b.serving) == (["a"], second)
    a.silence = 30.0
    a.restart(Deadline(START_SECONDS))
    assert (a.lost, a.serving, a.unfinished()) == ("", None, [])
    a.submit(requests[:2])  # they wait for weights
    third = house.trainer.become(seed + 2)
    assert manager.sync(third).ending is Ending.COMMITTED
    assert (a.serving, b.serving) == (third, third)
    assert_same(ear.take(2), alone(house.trainer.model, requests[:2], version=third))


def test_a_replica_that_dies_in_a_sync_is_left_out_of_it(house: House) -> None:
    a, b = house.replicas
    manager = house.manager()
    manager.sync(house.trainer.become(seed := a_seed()))
    ear, other_ear = Ear(a), Ear(b)
    house.deadly["a"].armed = True
    second = house.trainer.become(seed + 1)
    report = manager.sync(second)
    assert "SIGKILL" in report.fenced["a"], report.fenced
    assert (a.serving, b.serving) == (None, second)
    until(lambda: ear.losses, "the death is told")
    requests = make_requests(4, seed)
    b.submit(requests)
    assert_same(other_ear.take(4), alone(house.trainer.model, requests, version=second))
    a.restart(Deadline(START_SECONDS))
    assert manager.sync(house.trainer.become(seed + 2)).ending is Ending.COMMITTED
    assert a.serving == seed + 2


@pytest.mark.slow
def test_an_engine_that_there_is_not(replicas: list[RemoteReplica]) -> None:
    client = RemoteReplica(msgspec.structs.replace(replicas[0].setup, engine="transformer"), start)
    with pytest.raises(UsageError, match="did you mean 'transformers'"):
        client.begin(Deadline(START_SECONDS))
    with pytest.raises(ReplicaLostError, match="not been started"):
        client.submit([Request(RequestKey(0, 0), (1,), SamplingParams(1), seed=1)])


def test_who_listens_and_fails_is_heard_of(house: House) -> None:
    house.manager().sync(house.trainer.become(a_seed()))
    b, losses = house.replicas[1], []

    def fail(_: str, outputs: list[Output]) -> None:
        raise KeyError("a fault of the driver's")

    b.listen(fail, lambda _, reason: losses.append(reason))
    b.submit([Request(RequestKey(0, 0), (1, 2, 3), SamplingParams(4), seed=1)])
    until(lambda: losses, "the replica is given up")
    assert losses == ['what it said was not taken (KeyError: "a fault of the driver\'s")']


def test_calls_under_way_fail_at_once(house: House) -> None:
    a = house.replicas[0]
    os.kill(a.pid, signal.SIGSTOP)
    calls = [call(lambda: a.digests(None, Deadline(SECONDS)), "test") for _ in range(3)]
    a.kill("enough")
    for future in calls:
        assert str(future.exception(SECONDS / 2)) == "replica a is lost: enough"
