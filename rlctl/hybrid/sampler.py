"""What generates on a rank that trains too, by the name of the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.hybrid.tp.engine import TensorParallelEngine
from rlctl.hybrid.tp.group import TensorGroup
from rlctl.rollout.base import Output, Request

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RankSampler(Protocol):
    """One rank of a replica; see ``RolloutEngine``. All ranks of it make the same calls and get the same outputs."""

    @property
    def version(self) -> int | None:
        """The version of the weights, None while they sleep."""

    @property
    def num_running(self) -> int:
        """Requests submitted whose output has not been returned."""

    def adopt(self, shards: Mapping[str, Tensor], version: int) -> None:
        """Compute with this rank's part of version ``version``, which nobody else writes to; requests are kept."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def step(self) -> list[Output]:
        """Decode one token for every running request; return what ended."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the outputs of ``requests``, in their order."""

    def abort(self) -> list[Output]:
        """End all requests, keeping the tokens made so far."""

    def sleep(self, level: int) -> None:
        """Free the KV cache (1), and the weights too (2). Requests are kept."""

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the KV cache again."""


@dataclass(frozen=True)
class Sampling:
    """How a rank generates.

    Attributes:
        engine: name of the rollout engine, as in ``rollout.engine``.
        tp: ranks of a replica.
        dtype: "float32" or "bfloat16".
        max_slots, max_length: see ``RolloutEngine``.
        device: as torch names it.
        deadline: seconds that a collective of a replica waits for another rank.
        whole_vocab: every rank has embedding and head whole.
        pad: heads and widths that the ranks do not divide are padded with zeros.
    """

    engine: str
    tp: int
    dtype: str
    max_slots: int
    max_length: int
    device: str
    deadline: float
    whole_vocab: bool = False
    pad: bool = False


def make_sampler(config: Any, how: Sampling, ranks: Sequence[int], group: TensorGroup) -> RankSampler | None:
    """Return what generates on this rank, its weights asleep; None where nothing does. All ranks make the call.

    Args:
        config: the model's transformers configuration.
        how: see Sampling.
        ranks: that generate, one replica's after the other.
        group: this rank's replica.

    Raises:
        UsageError: the sampler does not know the model, or it cannot be cut into so many parts.
        UnavailableError: the engine's package is not installed, or computes elsewhere.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    number = ranks.index(rank) // how.tp if rank in ranks else -1
    if how.engine == "vllm":
        from rlctl.hybrid.vllm.sampler import make_vllm_sampler

        return make_vllm_sampler(config, how, [ranks[at : at + how.tp] for at in range(0, len(ranks), how.tp)], number)
    if number < 0:
        return None
    sampler = TensorParallelEngine(
        config,
        group=group,
        dtype=_DTYPES[how.dtype],
        whole_vocab=how.whole_vocab,
        pad=how.pad,
        max_slots=how.max_slots,
        max_length=how.max_length,
        replica=str(number),
        device=how.device,
    )
    sampler.sleep(2)
    return sampler
