"""What the owners of the engine kimi stage in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlctl.sync.backends.kimi_stage import HostStage
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.merging import Merger
from rlctl.sync.unpacker import Unpacker
from tests.sync.kimi_side import BUCKET
from tests.sync.wire_cases import assert_same, hard_tensors


def staged(tensors: dict[str, torch.Tensor], owners: int, nbytes: int, version: int = 1) -> list[HostStage]:
    stages = [HostStage(nbytes, pinned=False) for _ in range(owners)]
    for owner, stage in enumerate(stages):
        stage.fill(tensors.items(), version=version, verify="full", owner=owner, owners=owners)
    return stages


def in_turn(stages: list[HostStage], base_version: int | None = None) -> Iterator[FilledBucket]:
    """The buckets as workers get them: owner after owner."""
    merger = Merger(len(stages), version=1, base_version=base_version, verify="full")
    parts = {owner: list(stage.buckets(base_version)) for owner, stage in enumerate(stages)}
    while parts:
        for owner in list(parts):
            bucket = parts[owner].pop(0)
            if not parts[owner]:
                del parts[owner]
            yield merger.add(owner, bucket, last=not parts)


@pytest.mark.parametrize("owners", [1, 2, 3, 4])
def test_each_owner_stages_one_nth_and_together_they_have_every_bit(owners: int) -> None:
    for tensors in (hard_tensors(owners), {"only": torch.randn(30_011)}, {"none": torch.empty(0)}):
        stages = staged(tensors, owners, BUCKET)
        model = sum(-(-t.nbytes // 256) * 256 for t in tensors.values())
        sizes = [sum(bucket.meta.used for bucket in stage.buckets(None)) for stage in stages]
        assert model - 256 * len(tensors) <= sum(sizes) <= model
        assert max(sizes) - min(sizes) <= BUCKET
        assert max(stage.nbytes for stage in stages) <= model / owners + BUCKET
        unpacker = Unpacker()
        unpacker.begin(version=1)
        got = {n: t.clone() for n, t in unpacker.tensors(in_turn(stages))}
        assert_same(tensors, got)


def test_host_memory_is_used_again_and_let_go_when_less_is_needed() -> None:
    (stage,) = staged({"a": torch.zeros(10 * BUCKET, dtype=torch.uint8)}, 1, BUCKET)
    first = [bucket.data.data_ptr() for bucket in stage.buckets(None)]
    stage.fill([("a", torch.ones(9 * BUCKET, dtype=torch.uint8))], version=2, verify="off", owner=0, owners=1)
    assert [bucket.data.data_ptr() for bucket in stage.buckets(None)] == first[:9]
    assert stage.nbytes == 9 * BUCKET


def test_a_stream_that_breaks_leaves_no_version() -> None:
    (stage,) = staged(hard_tensors(0), 1, BUCKET)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(5)
        raise OSError("gather failed")

    with pytest.raises(OSError, match="gather failed"):
        stage.fill(broken(), version=2, verify="full", owner=0, owners=1)
    assert stage.version is None
