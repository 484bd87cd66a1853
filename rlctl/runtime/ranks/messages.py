"""What the run and its trainer ranks say to each other. A tensor follows its head, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.model.memory_settings import Memory
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from rlctl.sync.error_data import ErrorData

if TYPE_CHECKING:
    import torch

PIECE = 32 << 20


class RankSetup(msgspec.Struct):
    """How a rank is made.

    Attributes:
        rank, world, tp: which one of how many, and the size of tensor-parallel groups.
        store: where the ranks meet, see ``meeting``.
        timeout: longest wait in a collective, in seconds.
        device: "cpu", "cuda" or "npu"; the rank takes the first that its place shows it.
        threads: compute threads.
        source: folder or hub name of the model.
        interface: network interface that gloo listens on: loopback where all ranks are on one machine; empty for the
            one that the machine's name leads to.
        engine: "fsdp2", or "local" for the whole model on the only rank.
        noted: whether the first rank remembers digests of what syncs send.
        lora: the adapter that is trained; None trains all weights.
        seed: of the adapter's first values.
        adapter_alone: whether weight syncs carry the adapter alone, behind its base where somebody lacks that.
    """

    rank: int
    world: int
    tp: int
    store: str
    timeout: float
    device: str
    threads: int
    source: str
    trust_remote_code: bool
    optimizer: OptimizerConfig
    dtype: str
    micro_batch_tokens: int
    total_updates: int
    memory: Memory
    engine: str = "fsdp2"
    interface: str = "lo"
    noted: bool = False
    lora: LoraConfig | None = None
    seed: int = 0
    adapter_alone: bool = False


class Order(msgspec.Struct, array_like=True):
    """What a rank is to do: the name of an operation and its arguments."""

    operation: str
    arguments: dict[str, Any] = {}


class Report(msgspec.Struct, array_like=True):
    """What a rank says: "pass" (a sign of life), "tensor" (its bytes follow), "done", "failed", or "answer" (to a
    command of a weight sync, which may come when nobody waits for it any more).

    Attributes:
        waiting: the failure came out of a collective, so it may be another rank's.
        number: of the command that an "answer" belongs to.
    """

    kind: str
    result: Any = None
    error: ErrorData | None = None
    waiting: bool = False
    number: int = 0


class TensorHead(msgspec.Struct, array_like=True):
    """A tensor that is about to come."""

    kind: str
    name: str
    dtype: str
    shape: list[int]
    nbytes: int


def head_of(kind: str, name: str, tensor: torch.Tensor) -> TensorHead:
    """Return the description of a tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    return TensorHead(kind, name, dtype_code(tensor.dtype), list(tensor.shape), nbytes)


def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE].numpy().data


def tensor_from(head: TensorHead, receive: Callable[[], bytes]) -> torch.Tensor:
    """Return the tensor whose pieces ``receive`` gives one after the other."""
    import torch

    flat = torch.empty(head.nbytes, dtype=torch.uint8)
    done = 0
    while done < head.nbytes:
        piece = torch.frombuffer(bytearray(receive()), dtype=torch.uint8)
        flat[done : done + piece.numel()] = piece
        done += piece.numel()
    return flat.view(torch_dtype(head.dtype)).reshape(head.shape)
