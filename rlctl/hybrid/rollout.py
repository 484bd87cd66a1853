"""Generation on all replicas of a hybrid engine: prompts dealt out, every rank told every response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlctl.errors import UsageError
from rlctl.experience.rows import Row
from rlctl.experience.segments import FinishReason, RequestKey
from rlctl.hybrid.reshard.errors import ReshardError
from rlctl.hybrid.reshard.watch import Watch
from rlctl.hybrid.sampler import RankSampler
from rlctl.hybrid.tp.group import CollectiveError, TensorGroup, naming, replicas
from rlctl.model.fsdp2.dealing import gather_bytes
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.units import format_duration

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


class Replicas:
    """The replicas that all ranks make up; every rank makes one, and the same calls.

    Args:
        ranks: that generate, one replica's after the other: all that there are.
        tp: ranks of a replica.
        device: of what travels.
        deadline: seconds that a collective waits for another rank.
    """

    def __init__(self, ranks: Sequence[int], tp: int, *, device: torch.device, deadline: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.number, self.count = ranks.index(self.rank) // tp, self.size // tp
        self.group = TensorGroup(replicas(ranks, tp, timeout=deadline))
        everybody = dist.new_group(timeout=timedelta(seconds=deadline))
        assert isinstance(everybody, dist.ProcessGroup)
        self._everybody, self._device, self._deadline = everybody, device, deadline
        self._watch = Watch(everybody, self.rank, self.size)

    def generate(self, engine: RankSampler, requests: Sequence[Request]) -> list[Response]:
        """Return the responses to all requests, on every rank; each replica serves whole prompts.

        Args:
            engine: this rank's.
            requests: the same on all ranks.

        Raises:
            ReshardError: a rank is dead or stuck; names it and its phase.
        """
        mine = [request for request in requests if request.key.ordinal % self.count == self.number]
        with self.together("generation"):
            made = [_response(r, output) for r, output in zip(mine, engine.generate(mine), strict=True)]
            self._watch.enter("telling", waits=True)
            told = self._tell(made if self.group.rank == 0 else [])
        found = {response.key: response for response in told}
        return [found[request.key] for request in requests]

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Do something in which all ranks wait for each other. Raises ReshardError when one is dead or stuck; names it
        and its phase."""
        with self._watch.switch():
            self._watch.enter(phase, waits=True)
            try:
                yield
            except CollectiveError as error:
                raise self._held_up(phase) from error
            except RuntimeError as error:
                # What torch raises for a group's own wait has no class of its own.
                if isinstance(error, dist.DistError) or "gloo" in str(error):
                    raise self._held_up(phase) from error
                raise

    def hold_to_deadline(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give the groups of DTensors, and the default one, this deadline."""
        meshes = {part.device_mesh for part in parameters if isinstance(part, DTensor)}
        for group in (dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._deadline), group)  # noqa: SLF001 - the only way

    def tell(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in the order of ranks."""
        with naming("all_gather"):
            return gather_bytes(data, self._everybody, self.size, self._device)

    def _tell(self, made: list[Response]) -> list[Response]:
        told = self.tell(msgspec.msgpack.encode(made))
        return [response for data in told for response in msgspec.msgpack.decode(data, type=list[Response])]

    def _held_up(self, phase: str) -> ReshardError:
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self._watch.culprits(others)
        phases = {rank: said.replace("before the switch", f"before {phase}") for rank, said in found.items()}
        who = ", ".join(f"rank {rank} (phase {phase!r})" for rank, phase in sorted(phases.items()))
        return ReshardError(
            f"rank {self.rank} waited for {who} in {phase}, {format_duration(self._deadline)} at most",
            ranks=phases,
            phase=phase,
        )


def _response(request: Request, output: Output) -> Response:
    assert output.finish_reason != "abort"
    version = output.segments[0].version
    prompt = list(request.prompt_ids)
    return Response(output.key, prompt, output.token_ids, output.logprobs, output.finish_reason, version)
