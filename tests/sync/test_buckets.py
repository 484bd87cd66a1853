"""Packing and unpacking: every awkward tensor exact, and nothing copied twice."""

import random
from collections.abc import Iterator

import pytest
import torch

from rlctl.errors import FindingsError, UsageError
from rlctl.sync.buckets import Buckets, FilledBucket, allocate
from rlctl.sync.cutting import flat_layout, plan_buckets, require_bucket
from rlctl.sync.digest import Verify
from rlctl.sync.errors import MismatchError
from rlctl.sync.packer import Packer
from rlctl.sync.runs import APART_NBYTES, message_of, messages, room_for, spread
from rlctl.sync.tensor_meta import ALIGN, TensorMeta, preflight
from rlctl.sync.unpacker import Unpacker
from tests.sync.packing import packed, unpack
from tests.sync.wire_cases import assert_same, bits, hard_tensors, random_tensor

MIB = 1 << 20


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
@pytest.mark.parametrize("nbytes", [256, 1000, 4096, 65536])
def test_every_tensor_arrives_exact(nbytes: int, verify: Verify) -> None:
    tensors = hard_tensors(seed=nbytes)
    buckets = packed(tensors, nbytes, verify)
    assert_same(tensors, unpack(buckets, verify))
    assert all(m.used <= nbytes and d.numel() == m.used for m, d, _ in buckets)
    assert all(c.offset % ALIGN == 0 for m, *_ in buckets for c in m.chunks)
    assert [m.summary is not None for m, *_ in buckets] == [False] * (len(buckets) - 1) + [True]


@pytest.mark.parametrize("small", [3, 40_000])
def test_what_is_small_between_large_pieces_goes_in_one_message(small: int) -> None:
    """Unless it is much; every byte arrives where it belongs."""
    sizes = [s for i in range(30) for s in (APART_NBYTES + 8 * i, small)]
    tensors = {f"{i}": torch.randint(0, 256, (s,), dtype=torch.uint8) for i, s in enumerate(sizes)}
    ((meta, data, _),) = packed(tensors, 30 << 20)
    found = messages(meta)
    assert sum(len(runs) > 1 for runs in found) == (small == 3)
    assert len(found) == (31 if small == 3 else 60)
    received = torch.zeros_like(data)
    for runs in found:
        sent = message_of(runs, data, {})
        room_for(runs, received, {}).copy_(sent)
        spread(runs, sent, received)
    assert_same(tensors, unpack([FilledBucket(meta, received)]))


def test_buckets_are_cut_as_planned() -> None:
    tensors = hard_tensors(seed=1)
    planned = plan_buckets([TensorMeta.of(n, t) for n, t in tensors.items()], 4096)
    for (meta, *_), chunks in zip(packed(tensors, verify="off"), planned, strict=True):
        assert list(meta.chunks) == chunks


def test_an_empty_stream_is_one_empty_bucket() -> None:
    (bucket,) = packed({})
    assert bucket.meta.used == 0
    assert bucket.meta.summary is not None
    assert unpack([bucket]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_straight_into_targets(seed: int) -> None:
    tensors = hard_tensors(seed)
    targets = {n: torch.zeros_like(t).detach() for n, t in tensors.items()}
    targets["large"] = torch.zeros(101, 40).t()  # a target that is not contiguous
    targets["expanded"] = torch.zeros(4, 3, dtype=torch.float16)
    targets["conjugate"] = torch.zeros(3, dtype=torch.complex64)
    extra = {**targets, "not sent": torch.zeros(1)}
    del extra["odd.3"]
    unpacker = Unpacker()
    unpacker.begin(version=3)
    report = unpacker.into(packed(tensors), extra)
    assert report.unknown == ["odd.3"]
    assert report.untouched == ["not sent"]
    assert report.loaded == [n for n in tensors if n != "odd.3"]
    assert_same({n: t for n, t in tensors.items() if n != "odd.3"}, {n: targets[n] for n in report.loaded})


def test_two_buckets_of_memory_and_views_into_them() -> None:
    """Memory stays at two buckets: the packer fills in turn, and whole tensors are views of the bucket they came in."""
    memory = [allocate(8192) for _ in range(2)]
    buckets = Buckets(8192, memory=memory)
    tensors = {f"t{i}": torch.randn(1000) for i in range(20)}
    ranges = [(m.data_ptr(), m.data_ptr() + 8192) for m in memory]
    unpacker = Unpacker()
    unpacker.begin(version=0)
    seen = 0
    for name, tensor in unpacker.tensors(Packer(8192, buckets.acquire, version=0).pack(tensors.items())):
        assert any(a <= tensor.data_ptr() < b for a, b in ranges)
        assert torch.equal(tensor, tensors[name])
        seen += 1
    assert seen == 20
    assert unpacker.summary is not None
    assert unpacker.summary.nbytes == 20 * 4000


def test_scratch_memory_is_kept_between_syncs() -> None:
    unpacker = Unpacker()
    addresses = set()
    for version in range(3):
        unpacker.begin(version=version)
        for _, tensor in unpacker.tensors(packed({"large": torch.randn(5000)}, version=version)):
            addresses.add(tensor.data_ptr())
    assert len(addresses) == 1


def test_the_source_is_read_once_it_is_asked_for() -> None:
    """A stream larger than memory passes: the packer holds one tensor at a time."""
    alive = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            alive.append(i)
            yield f"t{i}", torch.full((1024,), float(i))

    buckets = Buckets(4096)
    for bucket in Packer(4096, buckets.acquire, version=0).pack(stream()):
        assert alive[-1] <= bucket.meta.index + 1


def test_dtypes_are_cast_or_named_never_reinterpreted() -> None:
    sent = {"w": torch.tensor([1.0, 2.0]), "big": torch.arange(3000.0)}
    targets = {"w": torch.zeros(2, dtype=torch.bfloat16), "big": torch.zeros(3000, dtype=torch.bfloat16)}
    unpacker = Unpacker()
    unpacker.begin(version=3)
    with pytest.raises(MismatchError, match="tensor w is sent as F32, and the engine holds BF16"):
        unpacker.into(packed(sent), targets)
    unpacker.begin(version=3)
    unpacker.into(packed(sent), targets, cast=True)
    assert targets["w"].tolist() == [1.0, 2.0]
    assert torch.equal(targets["big"], sent["big"].bfloat16())
    unpacker.begin(version=3)
    with pytest.raises(MismatchError, match=r"sent as \(2,\), and the engine holds \(3,\)"):
        unpacker.into(packed({"w": torch.ones(2)}), {"w": torch.ones(3)})


def test_preflight_lists_everything_at_once() -> None:
    sent = [TensorMeta("a", "F32", (2,)), TensorMeta("b", "BF16", (2, 2)), TensorMeta("typo.c", "F32", (1,))]
    held = {"a": TensorMeta("a", "BF16", (2,)), "b": TensorMeta("b", "BF16", (4,)), "c": TensorMeta("c", "F32", (1,))}
    with pytest.raises(FindingsError, match="4 faults") as caught:
        preflight(sent, held)
    for text in ("a: sent as F32, held as BF16", "b: sent with shape (2, 2), held with (4,)", "typo.c: sent, but",
                 "c: held by the engine, but not sent"):  # fmt: skip
        assert text in str(caught.value)
    preflight(sent[:1], held, cast=True, partial=True)


def test_a_tensor_larger_than_the_bucket_is_found_before_the_first_step() -> None:
    embedding = TensorMeta("embed", "BF16", (248320, 5120))
    assert embedding.nbytes == 2_542_796_800
    with pytest.raises(UsageError, match="tensor embed has") as caught:
        require_bucket([TensorMeta("a", "F32", (2,)), embedding], 2048 * MIB)
    assert "at least 2425MiB" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        require_bucket([TensorMeta("embed", "BF16", (151936, 2048))], 512 * MIB)
    assert "at least 594MiB" in str(caught.value)
    require_bucket([embedding], 2425 * MIB)
    # Cut, the sum of a bucket never exceeds the limit.
    buckets = plan_buckets([embedding, TensorMeta("a", "F32", (2,))], 512 * MIB)
    assert [sum(c.nbytes for c in b) for b in buckets] == [512 * MIB] * 4 + [embedding.nbytes - 2048 * MIB + 8]


def test_a_partitioned_parameter_has_its_full_size() -> None:
    class Partitioned(torch.Tensor):
        ds_shape = (4096, 4096)

    meta = TensorMeta.of("w", torch.empty(0, dtype=torch.bfloat16).as_subclass(Partitioned))
    assert meta.nbytes == 32 * MIB
    empty = TensorMeta("empty", "BF16", (0, 4))
    small = TensorMeta("small", "BF16", (100,))
    alone = plan_buckets([small, meta, empty, small], 8 * MIB, split=False)
    assert [[c.tensor for c in bucket] for bucket in alone] == [[small], [meta], [empty, small]]
    assert [len(b) for b in plan_buckets([meta], 8 * MIB)] == [1] * 4


@pytest.mark.parametrize("seed", range(20))
def test_flat_layout_and_cutting_cover_every_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    metas = [TensorMeta(f"t{i}", rng.choice(["U8", "BF16", "F64"]), (rng.choice([0, 1, 7, 300, 5000]),))
             for i in range(30)]  # fmt: skip
    chunks, total = flat_layout(metas)
    ends = 0
    for chunk in chunks:
        assert chunk.offset >= ends
        assert chunk.offset % ALIGN == 0
        ends = chunk.offset + chunk.nbytes
    assert ends <= total < ends + ALIGN
    size = rng.choice([256, 1024, 10000])
    for meta in metas:
        parts = [c for bucket in plan_buckets(metas, size) for c in bucket if c.tensor == meta]
        assert sum(c.nbytes for c in parts) == meta.nbytes
        assert [c.start for c in parts] == [sum(p.nbytes for p in parts[:i]) for i in range(len(parts))]
        assert meta.nbytes > size or len(parts) == 1


def test_random_bits_survive(seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = random_tensor((300, 77), torch.bfloat16, generator)
    got = unpack(packed({"x": tensor}, 65536))
    assert bits(got["x"]) == bits(tensor)
