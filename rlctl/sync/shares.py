"""Which tensors of a stream each of several senders sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rlctl.sync.tensor_meta import TensorMeta


def share(stream: Iterable[tuple[str, torch.Tensor]], rank: int, senders: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that sender ``rank`` sends, and take all. Every rank sees the same stream and so deals it
    alike: each tensor to the sender with the fewest bytes so far, the lowest of several."""
    if senders == 1 and rank == 0:
        yield from stream
        return
    loads = [0] * senders
    for name, tensor in stream:
        sender = loads.index(min(loads))
        loads[sender] += TensorMeta.of(name, tensor).nbytes
        if sender == rank:
            yield name, tensor
