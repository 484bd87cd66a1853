"""Generation on all replicas of a hybrid engine: prompts dealt out, every rank told every response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rlctl.errors import UsageError
from rlctl.experience.rows import Row
from rlctl.experience.segments import FinishReason, RequestKey
from rlctl.hybrid.tp.engine import TensorParallelEngine
from rlctl.model.fsdp2.dealing import gather_bytes
from rlctl.rollout.base import Request, SamplingParams

Prompts = Sequence[str | Sequence[int]]


class Response(msgspec.Struct, frozen=True):
    """One response.

    Attributes:
        key: of its request: (ordinal of the prompt, sample, turn).
        prompt_ids, token_ids: int token ids.
        logprobs: natural log of the probability of each of ``token_ids``.
        finish_reason: ``stop`` or ``length``.
        version: of the weights that made it.
    """

    key: RequestKey
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int


@dataclass(frozen=True)
class Rollout:
    """Responses in the order of their prompts, those of one prompt beside each other.

    Attributes:
        responses: tokens and log-probs.
        texts: what the tokenizer makes of them, special tokens left out; empty without a tokenizer.
    """

    responses: list[Response]
    texts: list[str]

    def batch(self, advantages: Sequence[float], rewards: Sequence[float] | None = None) -> list[Row]:
        """Return the rows that ``compute_loss`` takes.

        Args:
            advantages: of each response.
            rewards: of each response, kept in the rows.
        """
        if len(advantages) != len(self.responses):
            raise UsageError(f"{len(advantages)} advantages for {len(self.responses)} responses")
        rows = []
        for index, (response, advantage) in enumerate(zip(self.responses, advantages, strict=True)):
            size = len(response.token_ids)
            logprobs = np.asarray(response.logprobs, np.float32)
            rows.append(
                Row(
                    key=response.key,
                    group=response.key.ordinal,
                    prompt_ids=response.prompt_ids,
                    response_ids=response.token_ids,
                    reward=float(rewards[index]) if rewards is not None else 0.0,
                    rollout_logprobs=logprobs,
                    versions=np.full(size, response.version, np.int64),
                    old_logprobs=logprobs,
                    advantages=np.full(size, advantage, np.float32),
                )
            )
        return rows


def requests_of(
    prompts: Prompts, tokenizer: Any, params: SamplingParams, *, samples: int, seed: int, first_ordinal: int
) -> list[Request]:
    """Return the requests of all prompts, ``samples`` of each, prompts counted from ``first_ordinal``."""
    requests = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise UsageError("prompts are text, and there is no tokenizer", fix="give token ids")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        requests += [
            Request(RequestKey(first_ordinal + number, sample), tuple(ids), params, seed) for sample in range(samples)
        ]
    return requests


def generate(
    engine: TensorParallelEngine, requests: Sequence[Request], *, replica: int, replicas: int, device: torch.device
) -> list[Response]:
    """Return the responses to all requests, on every rank. All ranks call it with the same requests.

    Args:
        engine: this rank's; those of a replica make the same calls.
        replica: which of the ``replicas`` this rank is part of; each serves whole prompts.
        device: of what travels.
    """
    mine = [request for request in requests if request.key.ordinal % replicas == replica]
    made = []
    for request, output in zip(mine, engine.generate(mine), strict=True):
        assert output.finish_reason != "abort"
        version = output.segments[0].version
        prompt = list(request.prompt_ids)
        made.append(Response(output.key, prompt, output.token_ids, output.logprobs, output.finish_reason, version))
    group = dist.group.WORLD
    assert group is not None
    told = msgspec.msgpack.encode(made if engine.group.rank == 0 else [])
    found: dict[RequestKey, Response] = {}
    for data in gather_bytes(told, group, dist.get_world_size(), device):
        found.update((response.key, response) for response in msgspec.msgpack.decode(data, type=list[Response]))
    return [found[request.key] for request in requests]
