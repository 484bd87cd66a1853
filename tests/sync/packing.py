"""Buckets filled and emptied, without a wire between."""

import torch

from rlctl.sync.buckets import FilledBucket, allocate
from rlctl.sync.digest import Verify
from rlctl.sync.packer import Packer
from rlctl.sync.tensor_meta import BucketMeta
from rlctl.sync.unpacker import Unpacker


def packed(
    tensors: dict[str, torch.Tensor], nbytes: int = 4096, verify: Verify = "full", version: int = 3
) -> list[FilledBucket]:
    """All buckets of a sync, each in memory of its own and with its description through the wire form."""
    packer = Packer(nbytes, lambda _: allocate(nbytes), version=version, verify=verify)
    return [FilledBucket(BucketMeta.decode(m.encode()), d.clone()) for m, d, _ in packer.pack(tensors.items())]


def unpack(buckets: list[FilledBucket], verify: Verify = "full", version: int = 3) -> dict[str, torch.Tensor]:
    unpacker = Unpacker()
    unpacker.begin(version=version, verify=verify)
    return {name: tensor.clone() for name, tensor in unpacker.tensors(buckets)}
