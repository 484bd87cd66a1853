"""Digests: the same on both sides whatever the pieces, different for whatever differs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlctl.sync.digest import (
    SAMPLE_BLOCK,
    SAMPLE_GROUP,
    Hasher,
    SyncDigest,
    Verify,
    bind,
    content_digest,
    hasher,
    sampled_ranges,
)
from rlctl.sync.errors import CorruptedError
from rlctl.sync.tensor_meta import TensorMeta


def data_of(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def feed(hashing: Hasher, data: np.ndarray, rng: random.Random) -> bytes:
    begin = 0
    while begin < data.nbytes:
        end = begin + rng.choice([1, 256, 4096, 100_000, 1 << 20])
        hashing.update(data[begin:end])
        begin = end
    return hashing.content()


@pytest.mark.parametrize("verify", ["full", "sampled"])
@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 3_000_001])
def test_pieces_do_not_matter(nbytes: int, verify: Verify) -> None:
    meta, data = TensorMeta("w", "U8", (nbytes,)), data_of(nbytes)
    digests = {feed(hasher(meta, verify, 4), data, random.Random(seed)) for seed in range(4)}
    whole = hasher(meta, verify, 4)
    whole.update(data)
    assert digests == {whole.content()}
    if verify == "full":
        assert digests == {content_digest(data)}


def test_every_flip_and_every_swap_shows() -> None:
    data = data_of(1 << 16)
    seen = {content_digest(data)}
    rng = random.Random(1)
    for _ in range(300):
        changed = data.copy()
        if rng.random() < 0.5:
            changed[rng.randrange(data.nbytes)] ^= 1 << rng.randrange(8)
        else:
            words = changed.view(np.uint64)
            i, j = rng.sample(range(words.size), 2)
            words[[i, j]] = words[[j, i]]  # an exclusive-or of all words would not see this
        seen.add(content_digest(changed))
    assert len(seen) == 301


def test_sampling_sees_first_and_last_block_and_others_at_every_version() -> None:
    meta = TensorMeta("w", "U8", (SAMPLE_BLOCK * 100 + 17,))
    unions = set()
    for version in range(120):
        ranges = list(sampled_ranges(meta, version))
        assert ranges == sorted(set(ranges))
        assert ranges[0] == (0, SAMPLE_BLOCK)
        assert ranges[-1] == (SAMPLE_BLOCK * 100, SAMPLE_BLOCK * 100 + 17)
        assert 100 // SAMPLE_GROUP <= len(ranges) <= 100 // SAMPLE_GROUP + 3
        unions.update(ranges)
    assert len(unions) == 101  # in time every block is looked at
    assert list(sampled_ranges(TensorMeta("e", "U8", (0,)), 0)) == [(0, 0)]


def test_a_digest_is_bound_to_what_the_tensor_is_and_belongs_to() -> None:
    content = content_digest(data_of(8))
    metas = [TensorMeta("a", "F32", (2,)), TensorMeta("b", "F32", (2,)), TensorMeta("a", "I32", (2,)),
             TensorMeta("a", "F32", (2, 1))]  # fmt: skip
    bound = {bind(m, content, version=v, base_version=b) for m in metas for v in (1, 2) for b in (None, 0, 1)}
    assert len(bound) == 4 * 2 * 3
    assert bind(metas[0], b"", version=1) == b""


def test_the_digest_of_a_sync_knows_every_tensor_and_no_order() -> None:
    metas = [TensorMeta(f"t{i}", "F32", (i,)) for i in range(5)]
    digests = [content_digest(data_of(8, seed=i)) for i in range(5)]

    def total(order: list[int], version: int = 1, base: int | None = None) -> bytes:
        sync = SyncDigest(version, base)
        for i in order:
            sync.add(metas[i], digests[i])
        assert sync.nbytes == sum(metas[i].nbytes for i in order)
        return sync.digest()

    assert total([0, 1, 2, 3, 4]) == total([4, 2, 0, 1, 3])
    assert (
        len({total([0, 1, 2, 3, 4]), total([0, 1, 2, 3]), total([0, 1, 2, 3, 4], 2), total([0, 1, 2, 3, 4], 1, 0)}) == 4
    )
    with pytest.raises(CorruptedError, match="tensor t0 arrived twice"):
        total([0, 0])
