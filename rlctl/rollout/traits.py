"""What each rollout engine can be used for, as data: known before any of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlctl.schema.layout import DeviceKind
from rlctl.sync.traits import BACKEND_TRAITS, Delivery


@dataclass(frozen=True)
class EngineTraits:
    """Where a rollout engine works.

    Attributes:
        devices: kinds of device that it runs on.
        tensor_parallel: a replica may span several devices.
        logprobs: it returns the log-prob of every sampled token.
        takes: what its ranks load: whole tensors, of which each keeps its part, or slices that are its part.
        lockstep: it decodes when it is told to, as deterministic runs need.
        spread: on the trainer's own ranks (hybrid layout) a replica may span several devices, and decodes when it is
            told to, all the same.
    """

    devices: tuple[DeviceKind, ...]
    tensor_parallel: bool
    logprobs: bool = True
    takes: Delivery = "whole"
    lockstep: bool = True
    spread: bool = False


ENGINE_TRAITS: Mapping[str, EngineTraits] = MappingProxyType(
    {
        "transformers": EngineTraits(("cpu", "cuda", "npu"), tensor_parallel=False, spread=True),
        "vllm": EngineTraits(("cpu", "cuda", "npu"), tensor_parallel=True, lockstep=False, spread=True),
        "sglang": EngineTraits(("cuda", "npu"), tensor_parallel=True, lockstep=False),
        "recorded": EngineTraits(("cpu", "cuda", "npu"), tensor_parallel=False),
    }
)


def delivery_to(engine: str, backend: str) -> Delivery:
    """Return what a checkpoint engine delivers to a rollout engine: slices where both can, else whole tensors."""
    takes, carries = ENGINE_TRAITS.get(engine.partition(":")[0]), BACKEND_TRAITS.get(backend)
    both = takes is not None and carries is not None and takes.takes == carries.delivery == "slices"
    return "slices" if both else "whole"
