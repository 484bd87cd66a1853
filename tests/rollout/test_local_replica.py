"""A replica in this process: the thread that decodes, and those who call while it does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.local_replica import LocalReplica
from rlctl.rollout.served import ServedEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, ReplicaLostError
from tests.rollout.remote.house import Ear, alone, assert_same, assert_told_true, long_requests
from tests.rollout.tiny import FUSED, VOCAB, make_model, make_requests
from tests.waiting import until

MODEL = make_model(FUSED["qwen2"], seed=5)


class Counting(EmbeddedEngine):
    """Counts its steps; the one after ``last`` fails."""

    steps = 0
    last = 1 << 40

    def step(self) -> list[Output]:
        self.steps += 1
        if self.steps > self.last:
            raise RlctlError("the device is gone")
        return super().step()


def served_by(name: str, **more: Any) -> tuple[LocalReplica, Counting]:
    engine = Counting(FUSED["qwen2"], dtype=torch.float32, max_length=256, max_slots=4, replica=name)
    engine.load_weights(MODEL.state_dict().items(), 3)
    client = LocalReplica(ServedEngine(engine, "token", **more), max_length=256, progress_ticks=4, **more)
    client.resume(3, Deadline(20))
    return client, engine


@pytest.fixture
def pair() -> Iterator[list[tuple[LocalReplica, Counting]]]:
    pair = [served_by("a"), served_by("b")]
    yield pair
    for client, _ in pair:
        client.close()


def test_what_a_replica_had_when_it_failed_goes_on_with_another(pair: list[tuple[LocalReplica, Counting]]) -> None:
    print("seed", seed := random.randrange(1 << 30))
    (a, engine), (b, _) = pair
    ear, other_ear = Ear(a), Ear(b)
    requests = [*make_requests(8, seed, longest=30), *long_requests(14, seed)[8:]]
    engine.last = random.Random(seed).randrange(150)
    a.submit(requests)
    until(lambda: ear.losses, "the failure is told")
    assert ear.losses == ["the device is gone"]
    with pytest.raises(ReplicaLostError, match="replica a is lost: the device is gone"):
        a.submit(requests)
    rest = a.unfinished()
    told = engine.last - engine.last % 4
    known = sum(len(s.token_ids) for r in rest for s in r.prefix)
    assert known + sum(len(output.token_ids) for output in ear.outputs) >= told  # a token a step at the least
    b.submit(rest)
    whole = sorted([*ear.outputs, *other_ear.take(len(rest))], key=lambda output: output.key)
    assert_told_true(whole, requests, {3: MODEL})
    expected = alone(MODEL, requests, version=3)
    assert [output.token_ids for output in whole] == [output.token_ids for output in expected]


def test_a_call_waits_for_one_step_at_most(pair: list[tuple[LocalReplica, Counting]]) -> None:
    (client, engine), _ = pair
    ear = Ear(client)
    requests = long_requests(8, 1)
    client.submit(requests)
    until(lambda: engine.steps, "it decodes")
    for _ in range(50):
        before = engine.steps
        client.abort([RequestKey(77, 0)], deadline=Deadline(inf))
        assert engine.steps - before <= 2  # one may have ended, and another begun, before the call came to wait
    assert_same(ear.take(8), alone(MODEL, requests, version=3))


def test_requests_are_taken_while_another_has_the_engine(pair: list[tuple[LocalReplica, Counting]]) -> None:
    (client, _), _ = pair
    ear = Ear(client)
    served = client.loaders[0]
    assert isinstance(served, ServedEngine)
    requests = make_requests(3, 2)
    with served._engine():  # as in a load
        client.submit(requests)
        assert len(client.unfinished()) == 3
        with pytest.raises(DeadlineError, match="waiting for the engine of replica a"):
            client.interrupt("keep", 4, Deadline(0.05))
    client.resume(3, Deadline(20))
    assert_same(ear.take(3), alone(MODEL, requests, version=3))


def test_a_tick_is_one_step() -> None:
    client, engine = served_by("in step", lockstep=True)
    requests = [Request(RequestKey(n, 0), (1, 2, 3), SamplingParams(6), seed=n) for n in range(2)]
    client.submit(requests)
    assert [len(client.tick(Deadline(20))) for _ in range(6)] == [0, 0, 0, 0, 0, 2]
    assert engine.steps == 6
    client.submit(requests)
    client.tick(Deadline(20))
    client.interrupt("abort", 4, Deadline(20))
    assert [[len(o.token_ids) for o in client.tick(Deadline(20))] for _ in range(2)] == [[1, 1], []]
    assert engine.steps == 7
    client.resume(3, Deadline(20))
    client.submit(requests)
    client.tick(Deadline(20))
    client.submit(later := [replace(requests[0], key=RequestKey(9, 0))])
    client.interrupt("wait", 4, Deadline(20))  # nobody ticks meanwhile
    assert [len(o.token_ids) for o in client.tick(Deadline(20))] == [6, 6]
    assert client.unfinished() == later
    client.close()
    with pytest.raises(ReplicaLostError, match="it was closed"):
        client.submit(requests)


def test_a_request_that_no_engine_serves_ends_the_replica(pair: list[tuple[LocalReplica, Counting]]) -> None:
    (client, _), _ = pair
    ear = Ear(client)
    good = Request(RequestKey(0, 0), (1, 2, 3), SamplingParams(4), seed=1)
    client.submit([replace(good, prompt_ids=(VOCAB,))])
    until(lambda: ear.losses, "the failure is told")
    assert "a token id is outside" in ear.losses[0]
    late: list[str] = []
    client.listen(lambda _, __: None, lambda _, reason: late.append(reason))
    assert late == ear.losses
