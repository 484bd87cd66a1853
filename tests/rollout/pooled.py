"""Replicas in a pool, and the tokens of one engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request
from rlctl.rollout.pool import ReplicaPool
from tests.rollout.thread_replicas import ThreadReplica
from tests.rollout.tiny import FUSED, finish, make_engine, make_model

MODEL = make_model(FUSED["qwen2"], seed=80)


Tokens = dict[RequestKey, list[int]]


def alone(requests: list[Request]) -> Tokens:
    """Return what one engine makes of them."""
    engine = make_engine(MODEL)
    engine.submit(requests)
    return {output.key: output.token_ids for output in finish(engine)}


@contextmanager
def replicas(*names: str, **more: Any) -> Iterator[list[ThreadReplica]]:
    made = [ThreadReplica(MODEL, name, **more) for name in names]
    try:
        yield made
    finally:
        for replica in made:
            replica.close()


def drain(pool: ReplicaPool, requests: list[Request]) -> Tokens:
    """Step until everything ended; what was aborted is sent again, as a rollouter does. Nothing comes twice."""
    by_key = {request.key: request for request in requests}
    tokens: Tokens = {}
    limit = time.monotonic() + 60
    while pool.num_running:
        assert time.monotonic() < limit
        for output in pool.step(0.5):
            assert output.key not in tokens
            if output.finish_reason == "abort":
                pool.submit([continued(by_key[output.key], output)])
            else:
                tokens[output.key] = output.token_ids
                assert len(output.token_ids) <= by_key[output.key].params.max_new_tokens
    return tokens


def continued(request: Request, output: Output) -> Request:
    return replace(request, prefix=tuple(output.segments))
