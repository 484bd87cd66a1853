"""Whether each part arrived as it was sent: holders hash what they give, takers hash where it lies now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.keys.dtypes import dtype_code, torch_dtype
from rlctl.sync.boxes import Box, sizes, slices
from rlctl.sync.digest import DIGEST_BYTES, SyncDigest, Verify, bind, hasher
from rlctl.sync.errors import CorruptedError
from rlctl.sync.plan import Transfer
from rlctl.sync.slicing import slice_name
from rlctl.sync.tensor_meta import TensorMeta


def require_arrived(
    outgoing: Sequence[tuple[Transfer, str]],
    incoming: Sequence[Transfer],
    held: Mapping[str, Tensor],
    shards: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None,
    version: int,
    verify: Verify,
) -> bytes:
    """Compare every part on its two ends; all ranks call it. Returns a digest of what this rank holds, bound to names,
    places and version; empty when nothing is verified.

    Args:
        outgoing: what this rank gives, to itself too, in the plan's order, with the dtype that it is generated with.
        incoming: what it takes.
        held: its training shards, of any dtype.
        shards: its generation shards.
        group: of all ranks; None when this one is alone.

    Raises:
        CorruptedError: a part lies otherwise than it was sent; it is named, with the rank that it came from.
    """
    if verify == "off":
        return b""
    given = [_digest(t, held[t.src_tensor], t.src_box, dtype, version, verify) for t, dtype in outgoing]
    said = _told(given, [t.dst for t, _ in outgoing], group)
    whole = SyncDigest(version)
    turn = dict.fromkeys(range(len(said)), 0)
    for t in incoming:
        target = shards[t.dst_tensor]
        mine = _digest(t, target, t.dst_box, dtype_code(target.dtype), version, verify)
        theirs = said[t.src][t.dst][turn[t.src]]
        turn[t.src] += 1
        if mine != theirs:
            raise CorruptedError(
                f"{slice_name(t.tensor, t.box)} of version {version} lies otherwise than rank {t.src} sent it"
            )
        whole.add(TensorMeta(slice_name(t.tensor, t.box), dtype_code(target.dtype), sizes(t.box)), mine)
    return whole.digest()


def _told(
    digests: Sequence[bytes], takers: Sequence[int], group: dist.ProcessGroup | None
) -> list[dict[int, list[bytes]]]:
    """Return what every rank says of the parts that it gives: rank -> taker -> digests, in the plan's order."""
    if group is None:
        return [_sorted_out(zip(takers, digests, strict=True))]
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(digests)]), group=group)
    most = max(int(count) for count in counts)
    record = DIGEST_BYTES + 8
    mine = np.zeros((most, record), np.uint8)
    for row, (taker, digest) in enumerate(zip(takers, digests, strict=True)):
        mine[row] = np.frombuffer(digest + taker.to_bytes(8, "little"), np.uint8)
    every = [torch.zeros((most, record), dtype=torch.uint8) for _ in counts]
    dist.all_gather(every, torch.from_numpy(mine), group=group)
    return [
        _sorted_out(
            (int.from_bytes(row[DIGEST_BYTES:], "little"), row[:DIGEST_BYTES])
            for row in (bytes(line) for line in table[: int(count)].numpy())
        )
        for count, table in zip(counts, every, strict=True)
    ]


def _sorted_out(pairs: Iterable[tuple[int, bytes]]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for taker, digest in pairs:
        found.setdefault(taker, []).append(digest)
    return found


def _digest(t: Transfer, tensor: Tensor, box: Box, dtype: str, version: int, verify: Verify) -> bytes:
    """Return the digest of a part where it lies in ``tensor``, as it is in ``dtype``."""
    part = tensor.detach()[slices(box)].to(torch_dtype(dtype)).contiguous()
    meta = TensorMeta(slice_name(t.tensor, t.box), dtype, sizes(t.box))
    taking = hasher(meta, verify, version)
    data = part.reshape(-1).view(torch.uint8).cpu()
    if data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        data = data.clone()  # memory that numpy has seen can never be given back, and masters leave the device
    taking.update(data.numpy())
    return bind(meta, taking.content(), version=version)
