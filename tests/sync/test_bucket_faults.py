"""Every fault in a bucket is found and named: damage, hostile descriptions, and repeats that nobody verifies."""

import random
from collections.abc import Callable

import pytest
import torch

from rlctl.sync.buckets import FilledBucket, allocate
from rlctl.sync.errors import CorruptedError
from rlctl.sync.packer import Packer
from rlctl.sync.tensor_meta import BucketMeta, TensorMeta
from rlctl.sync.unpacker import Unpacker
from tests.sync.packing import packed, unpack
from tests.sync.wire_cases import assert_same, hard_tensors

Damage = Callable[[list[FilledBucket], random.Random], list[FilledBucket]]


def _flip(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    while True:
        meta, data, _ = rng.choice(buckets)
        chunk = rng.choice(meta.chunks)
        if chunk.nbytes:
            data[chunk.offset + rng.randrange(chunk.nbytes)] ^= 1 << rng.randrange(8)
            return buckets


def _swap_words(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    while True:
        meta, data, _ = rng.choice(buckets)
        chunk = rng.choice(meta.chunks)
        if chunk.nbytes >= 64:
            words = data[chunk.offset : chunk.offset + chunk.nbytes // 8 * 8].view(torch.int64)
            i, j = rng.sample(range(words.numel()), 2)
            if words[i] != words[j]:
                words[[i, j]] = words[[j, i]]
                return buckets


def _drop(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    del buckets[rng.randrange(len(buckets))]
    return buckets


def _repeat(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    i = rng.randrange(len(buckets))
    return [*buckets[: i + 1], *buckets[i:]]


def _reorder(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    i, j = rng.sample(range(len(buckets)), 2)
    buckets[i], buckets[j] = buckets[j], buckets[i]
    return buckets


def _other_content(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    """The bytes of one bucket under the description of another."""
    i = rng.randrange(1, len(buckets) - 1)
    meta = buckets[i].meta
    other = buckets[i - 1].data[: meta.used]
    buckets[i] = FilledBucket(meta, torch.nn.functional.pad(other, (0, meta.used - other.numel())))
    return buckets


def _renumber(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    """A bucket is lost, and those after it close the gap in the numbering."""
    i = rng.randrange(len(buckets) - 1)
    rest = [b for n, b in enumerate(buckets) if n != i]
    return [FilledBucket(_change(m, index=n), d) for n, (m, d, _) in enumerate(rest)]


def _rename(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    return _swap_metas(buckets, "name")


def _retype(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    return _swap_metas(buckets, "dtype")


def _swap_metas(buckets: list[FilledBucket], field: str) -> list[FilledBucket]:
    change = {"name": lambda t: f"{t.name}x", "dtype": lambda t: {"F32": "I32", "BF16": "F16"}.get(t.dtype, t.dtype)}
    replaced = []
    for meta, data, _ in buckets:
        chunks = tuple(
            type(c)(
                TensorMeta(**{"name": c.tensor.name, "dtype": c.tensor.dtype, "shape": c.tensor.shape}
                           | {field: change[field](c.tensor)}),
                c.start, c.nbytes, c.offset, c.digest,
            )
            for c in meta.chunks
        )  # fmt: skip
        replaced.append(FilledBucket(_change(meta, chunks=chunks), data))
    return replaced


def _stale_version(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    i = rng.randrange(len(buckets))
    meta, data, _ = buckets[i]
    buckets[i] = FilledBucket(_change(meta, version=2), data)
    return buckets


def _stale_base(buckets: list[FilledBucket], rng: random.Random) -> list[FilledBucket]:
    return packed_against_base(hard_tensors(9), 1)


def packed_against_base(tensors: dict[str, torch.Tensor], base: int) -> list[FilledBucket]:
    packer = Packer(4096, lambda _: allocate(4096), version=3, base_version=base)
    return [FilledBucket(m, d.clone()) for m, d, _ in packer.pack(tensors.items())]


def _change(meta: BucketMeta, **changes: object) -> BucketMeta:
    fields = {f: getattr(meta, f) for f in ("index", "version", "used", "chunks", "summary")}
    return BucketMeta(**fields | changes)


@pytest.mark.parametrize(
    "damage",
    [_flip, _swap_words, _drop, _repeat, _reorder, _other_content, _renumber, _rename, _retype, _stale_version,
     _stale_base],
)  # fmt: skip
def test_every_fault_is_found(damage: Damage) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        buckets = damage(packed(hard_tensors(9)), rng)
        with pytest.raises(CorruptedError):
            unpack(buckets)


def test_an_early_end_and_a_wrong_verify_are_named() -> None:
    buckets = packed(hard_tensors(2))
    with pytest.raises(CorruptedError, match=r"ended after \d+ buckets, early"):
        unpack(buckets[:-1])
    with pytest.raises(CorruptedError, match="bucket 1 arrived where bucket 0 was due"):
        unpack(buckets[1:])
    with pytest.raises(CorruptedError, match="without a digest, and verify is full here"):
        unpack(packed(hard_tensors(2), verify="off"))
    with pytest.raises(CorruptedError, match="arrived after the end"):
        tail = FilledBucket(_change(buckets[-1].meta, index=len(buckets)), buckets[-1].data)
        unpack([*buckets, tail])


def test_a_tensor_sent_twice_is_refused_by_the_sender() -> None:
    packer = Packer(4096, lambda _: allocate(4096), version=0)
    with pytest.raises(CorruptedError, match="arrived twice"):
        list(packer.pack([("a", torch.ones(1)), ("a", torch.ones(1))]))


def test_hostile_descriptions_are_refused() -> None:
    (good,) = packed({"a": torch.ones(100)})
    chunk = good.meta.chunks[0]
    bad = [
        {"offset": 1},
        {"offset": 256},
        {"nbytes": 401},
        {"start": 256},
        {"tensor": TensorMeta("a", "F99", (100,))},
        {"tensor": TensorMeta("a", "F4", (3,))},
    ]
    for change in bad:
        fields = {f: getattr(chunk, f) for f in ("tensor", "start", "nbytes", "offset", "digest")} | change
        with pytest.raises(CorruptedError):
            BucketMeta.decode(_change(good.meta, chunks=(type(chunk)(**fields),)).encode())
    for data in (b"", b"\x81", _change(good.meta, used=-1).encode(), b"\xff" * 50):
        with pytest.raises(CorruptedError):
            BucketMeta.decode(data)


def test_a_repeated_sync_that_nobody_verifies_is_checked_as_the_first() -> None:
    """What is kept of a bucket by its description serves only a bucket that is the same, at the same place."""
    buckets = [allocate(4096) for _ in range(40)]
    tensors = {n: t for n, t in hard_tensors(5).items() if t.is_contiguous()} | {"cut": torch.randn(3000)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    unpacker = Unpacker()

    def sent(version: int) -> list[FilledBucket]:
        packer = Packer(4096, lambda k: buckets[k], version=version, verify="off")
        found = packer.pack(tensors.items())
        return [FilledBucket(BucketMeta.decode(meta.encode()), data) for meta, data, _ in found]

    def sync(version: int, replace: Callable[[list[FilledBucket]], list[FilledBucket]] = list) -> None:
        unpacker.begin(version=version, verify="off")
        unpacker.into(replace(sent(version)), targets)

    for version in range(3):
        tensors["cut"].normal_()
        sync(version)
        assert_same(tensors, targets)
    pieces = [n for n, bucket in enumerate(sent(3)) if not all(chunk.whole for chunk in bucket.meta.chunks)]
    for fault in (
        lambda found: found[:-1],
        lambda found: [*found[:2], found[1], *found[2:]],
        lambda found: [FilledBucket(_change(m, index=n), d) for n, (m, d, _) in enumerate([found[0], *found])],
        lambda found: [
            FilledBucket(_change(m, index=n), d)
            for n, (m, d, _) in enumerate(b for n, b in enumerate(found) if n != pieces[0])
        ],
        lambda found: _swap_metas(found, "name"),
    ):
        with pytest.raises(CorruptedError):
            sync(3, fault)
        sync(4)
    targets["cut"] = torch.zeros(3000)
    buckets[:] = [allocate(4096) for _ in range(40)]
    sync(5)
    assert_same(tensors, targets)
