"""Deltas: exact for every bit pattern, small, and refused where they do not belong."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from benchmarks.delta import adamw_steps, random_change
from rlctl.sync.buckets import Buckets
from rlctl.sync.delta import MARK, DeltaDecoder, DeltaEncoder
from rlctl.sync.delta_codec import apply, encode, find_changes, read_header
from rlctl.sync.digest import content_digest
from rlctl.sync.errors import CorruptedError, MismatchError, WrongBaseError
from rlctl.sync.packer import Packer
from rlctl.sync.unpacker import Unpacker
from tests.sync.wire_cases import DTYPES, assert_same, bits, hard_tensors, random_tensor


def mutated(tensor: torch.Tensor, density: float, seed: int) -> torch.Tensor:
    """A copy with about ``density`` of its elements replaced by random bits."""
    g = torch.Generator().manual_seed(seed)
    other = random_tensor(tuple(tensor.shape), tensor.dtype, g)
    where = torch.rand(tensor.shape, generator=g) < density
    plain = tensor.detach().clone().contiguous()
    size = plain.element_size()
    flat, new = plain.reshape(-1).view(torch.uint8).view(-1, size), other.reshape(-1).view(torch.uint8).view(-1, size)
    flat[where.reshape(-1)] = new[where.reshape(-1)]
    return flat.reshape(-1).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("density", [0.0, 0.0001, 0.004, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_exact(dtype: torch.dtype, density: float) -> None:
    from rlctl.keys.dtypes import dtype_code

    g = torch.Generator().manual_seed(3)
    old = random_tensor((70001,), dtype, g)
    new = mutated(old, density, seed=4)
    before, after = (t.view(torch.uint8).numpy().copy() for t in (old, new))
    change = find_changes(before, after, dtype_code(dtype))
    assert change.digest == content_digest(after)
    payload = encode(change, dtype_code(dtype), (70001,), content_digest(before))
    header = apply(payload, before)
    assert (before == after).all()
    assert header.result == change.digest


def test_long_jumps_nan_and_signed_zero() -> None:
    old = np.zeros(3_000_000, np.uint16)
    new = old.copy()
    for position in (0, 254, 255, 256, 510, 511, 70000, 70000 + 65535, 70000 + 2 * 65535, 2_999_999):
        new[position] = 0x8000  # -0.0
    new[1_000_000] = 0x7FC1  # a NaN with a payload
    for part in (slice(None), slice(0, 600)):  # two-byte gaps, one-byte gaps
        before, after = old[part].copy(), new[part].copy()
        change = find_changes(before.view(np.uint8), after.view(np.uint8), "BF16")
        payload = encode(change, "BF16", (after.size,), b"")
        assert read_header(payload).gap_nbytes == (2 if part == slice(None) else 1)
        apply(payload, before.view(np.uint8))
        assert (before == after).all()


def test_size_at_two_percent_of_random_values() -> None:
    old, new = random_change(1 << 21, 0.02)
    change = find_changes(old.view(np.uint8), new.view(np.uint8), "BF16")
    payload = encode(change, "BF16", (old.size,), b"")
    assert change.positions.size == pytest.approx(0.02 * old.size, rel=0.05)
    assert payload.nbytes / change.positions.size <= 3.2


def test_size_after_real_adamw_steps() -> None:
    old, new = adamw_steps(1 << 21, 1e-6)
    change = find_changes(old.view(np.uint8), new.view(np.uint8), "BF16")
    payload = encode(change, "BF16", (old.size,), b"")
    assert 0.01 < change.density < 0.04
    assert read_header(payload).kind == "steps"
    assert payload.nbytes / change.positions.size <= 1.5
    apply(payload, old.view(np.uint8))
    assert (old == new).all()


def carried(encoder: DeltaEncoder, tensors: dict[str, torch.Tensor], version: int, *, whole: bool = False):  # type: ignore[no-untyped-def]
    """The encoder's stream through buckets, as a receiver gets it."""
    buckets = Buckets(65536)
    packer = Packer(65536, buckets.acquire, version=version, base_version=encoder.version)
    unpacker = Unpacker()
    unpacker.begin(version=version, base_version=encoder.version)
    return unpacker.tensors(packer.pack(encoder.stream(tensors.items(), whole=whole)))


def start(seed: int = 1) -> tuple[dict[str, torch.Tensor], DeltaEncoder, DeltaDecoder, dict[str, torch.Tensor]]:
    """A sender and a receiver after a first, whole sync."""
    weights = {n: t.detach().clone().contiguous() for n, t in hard_tensors(seed).items()}
    weights["big"] = random_tensor((300, 1001), torch.bfloat16, torch.Generator().manual_seed(seed))
    targets = {n: torch.zeros_like(t) for n, t in weights.items()}
    encoder, decoder = DeltaEncoder(), DeltaDecoder(targets)
    report = decoder.load(carried(encoder, weights, 1))
    assert report.complete
    encoder.commit(1)
    assert_same(weights, targets)
    assert encoder.base_nbytes == sum(t.nbytes for t in weights.values())
    return weights, encoder, decoder, targets


def test_syncs_in_a_row_through_buckets() -> None:
    weights, encoder, decoder, targets = start()
    for version in range(2, 6):
        weights = {n: mutated(t, 0.02 if version % 2 else 0.2, version) for n, t in weights.items()}
        assert decoder.load(carried(encoder, weights, version)).complete
        encoder.commit(version)
        assert_same(weights, targets)
        assert encoder.stats.deltas > 0
        assert encoder.stats.sent < encoder.stats.scanned
    decoder.load(carried(encoder, weights, 6))
    assert encoder.stats.changed == 0  # nothing changed, nothing sent


def test_a_rollback_keeps_the_base() -> None:
    weights, encoder, decoder, targets = start()
    lost = {n: mutated(t, 0.02, 77) for n, t in weights.items()}
    lost["odd.3"] = mutated(lost["odd.3"], 1.0, 5)
    for _ in encoder.stream(lost.items()):
        pass
    encoder.rollback()  # the receiver never saw it
    later = {n: mutated(t, 0.02, 78) for n, t in weights.items()}
    assert decoder.load(carried(encoder, later, 2)).complete
    assert encoder.stats.deltas > 0
    encoder.commit(2)
    assert_same(later, targets)


def test_a_late_joiner_is_refused_until_it_gets_an_anchor() -> None:
    weights, encoder, _, _ = start()
    weights = {n: mutated(t, 0.02, 5) for n, t in weights.items()}
    targets = {n: torch.zeros_like(t) for n, t in weights.items()}
    late = DeltaDecoder(targets)
    with pytest.raises(WrongBaseError, match="no committed weights here"):
        late.load(carried(encoder, weights, 2))
    encoder.rollback()
    assert late.load(carried(encoder, weights, 2, whole=True)).complete
    encoder.commit(2)
    assert encoder.stats.deltas == 0
    weights = {n: mutated(t, 0.02, 6) for n, t in weights.items()}
    assert late.load(carried(encoder, weights, 3)).complete
    assert encoder.stats.deltas > 0
    assert_same(weights, targets)


def test_a_stale_or_altered_base_is_refused_before_anything_is_written() -> None:
    weights, encoder, decoder, targets = start()
    second = {n: mutated(t, 0.02, 5) for n, t in weights.items()}
    for _ in encoder.stream(second.items()):  # a sync that this receiver missed
        pass
    encoder.commit(2)
    third = {n: mutated(t, 0.02, 6) for n, t in second.items()}
    before = bits(targets["big"])
    with pytest.raises(WrongBaseError, match="other weights"):
        decoder.load([(n, t) for n, t in encoder.stream(third.items()) if n == "big" + MARK])
    assert bits(targets["big"]) == before

    weights, encoder, decoder, targets = start()
    second = {n: mutated(t, 0.02, 5) for n, t in weights.items()}
    targets["big"].view(torch.int16)[7, 7] ^= 1  # somebody wrote to the live weights
    with pytest.raises(WrongBaseError, match="the delta of big"):
        decoder.load(carried(encoder, second, 2))


def test_after_forgetting_only_whole_tensors_are_taken() -> None:
    weights, encoder, decoder, _ = start()
    decoder.forget()
    with pytest.raises(WrongBaseError):
        decoder.load(carried(encoder, {n: mutated(t, 0.02, 9) for n, t in weights.items()}, 2))


def test_names_shapes_and_dtypes() -> None:
    weights, encoder, decoder, targets = start()
    weights = {n: mutated(t, 0.02, 9) for n, t in weights.items()}
    sent = dict(encoder.stream(weights.items()))
    report = decoder.load([("typo" + MARK, sent["big" + MARK]), ("big" + MARK, sent["big" + MARK])])
    assert (report.loaded, report.unknown) == (["big"], ["typo"])
    assert set(report.untouched) == set(targets) - {"big"}
    targets["big"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match="tensor big is sent as BF16"):
        decoder.load([("big" + MARK, sent["big" + MARK])])
    with pytest.raises(MismatchError, match=r"sent as \(2,\), and held as \(3,\)"):
        decoder.load([("big", torch.zeros(2))])
    with pytest.raises(MismatchError, match="sent as F32, and the engine holds BF16"):
        decoder.load([("big", torch.zeros(3))])


def test_damaged_deltas_never_pass_and_never_crash() -> None:
    old, new = adamw_steps(1 << 16, 1e-6)
    base = content_digest(old.view(np.uint8))
    payload = encode(find_changes(old.view(np.uint8), new.view(np.uint8), "BF16"), "BF16", (old.size,), base)
    tensor = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16)
    unchanged = 0
    for seed in range(300):
        rng = random.Random(seed)
        damaged = payload.copy()
        if seed % 3:
            damaged[rng.randrange(damaged.size)] ^= 1 << rng.randrange(8)
        else:
            damaged = damaged[: rng.randrange(damaged.size)].copy()
        target = {"w": tensor.clone()}
        decoder = DeltaDecoder(target)
        decoder.load([("w", tensor)])
        try:
            decoder.load([("w" + MARK, torch.from_numpy(damaged))])
        except (CorruptedError, WrongBaseError, MismatchError):
            continue
        unchanged += 1
        assert bits(target["w"]) == new.tobytes(), seed  # only padding was hit
    assert unchanged < 10
