"""Deltas: exact for every bit pattern, small, and refused where they do not belong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
from rlctl.sync.protocols import LoadReport
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


def carried(
    encoder: DeltaEncoder, tensors: dict[str, torch.Tensor], version: int, base: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoder's stream through buckets, as a receiver gets it."""
    buckets = Buckets(65536)
    packer = Packer(65536, buckets.acquire, version=version, base_version=base)
    unpacker = Unpacker()
    unpacker.begin(version=version, base_version=base)
    return unpacker.tensors(packer.pack(encoder.stream(tensors.items(), base)))


@dataclass
class Pair:
    """A sender and a receiver after a first, whole sync."""

    weights: dict[str, torch.Tensor]
    encoder: DeltaEncoder
    targets: dict[str, torch.Tensor]

    @classmethod
    def start(cls, seed: int = 1) -> Pair:
        weights = {n: t.detach().clone().contiguous() for n, t in hard_tensors(seed).items()}
        weights["big"] = random_tensor((300, 1001), torch.bfloat16, torch.Generator().manual_seed(seed))
        pair = cls(weights, DeltaEncoder(), {n: torch.zeros_like(t) for n, t in weights.items()})
        assert pair.load(1, None).complete
        pair.encoder.commit(1)
        assert_same(weights, pair.targets)
        assert pair.encoder.base_nbytes == sum(t.nbytes for t in weights.values())
        return pair

    def change(self, density: float, seed: int) -> None:
        self.weights = {n: mutated(t, density, seed) for n, t in self.weights.items()}

    def load(self, version: int, against: int | None, **into: Any) -> LoadReport:
        """What was sent, received; the sync is not ended."""
        decoder = DeltaDecoder(**{"targets": self.targets, "version": version, **into})
        return decoder.load(carried(self.encoder, self.weights, version, against))


def test_syncs_in_a_row_through_buckets() -> None:
    pair = Pair.start()
    nbytes = sum(t.nbytes for t in pair.weights.values())
    for version in range(2, 6):
        pair.change(0.02 if version % 2 else 0.2, version)
        assert pair.load(version, version - 1).complete
        pair.encoder.commit(version)
        assert_same(pair.weights, pair.targets)
        assert pair.encoder.stats.deltas > 0
        assert pair.encoder.stats.sent < pair.encoder.stats.scanned
        assert pair.encoder.base_nbytes <= 1.25 * nbytes
    pair.load(6, 5)
    assert pair.encoder.stats.changed == 0  # nothing changed, nothing sent


@pytest.mark.parametrize("check", [True, False])
def test_a_shadow_is_made_of_the_base_and_a_delta(check: bool) -> None:
    pair = Pair.start()
    shadow = {n: torch.zeros_like(t) for n, t in pair.targets.items()}
    shadow["big"] = torch.zeros(1001, 300, dtype=torch.bfloat16).t()  # another layout
    before = {n: bits(t) for n, t in pair.targets.items()}
    pair.change(0.02, 5)
    staged = pair.load(2, 1, targets=shadow, base=pair.targets, check_bytes=check)
    assert staged.complete
    assert_same(pair.weights, shadow)
    assert {n: bits(t) for n, t in pair.targets.items()} == before
    in_place = pair.load(2, 1, check_bytes=check)
    assert staged.digest == in_place.digest
    anchor = DeltaDecoder(pair.targets, version=2, check_bytes=check).load(pair.weights.items())
    assert anchor.digest == in_place.digest  # it is of what the weights became, however they travelled


def test_a_rollback_keeps_the_base() -> None:
    pair = Pair.start()
    good = pair.weights
    pair.change(0.02, 77)
    pair.weights["odd.3"] = mutated(pair.weights["odd.3"], 1.0, 5)
    for _ in pair.encoder.stream(pair.weights.items(), 1):
        pass
    pair.encoder.rollback()  # the receiver never saw it
    pair.weights = good
    pair.change(0.02, 78)
    assert pair.load(2, 1).complete
    assert pair.encoder.stats.deltas > 0
    pair.encoder.commit(2)
    assert_same(pair.weights, pair.targets)


def test_a_sync_cut_short_or_of_another_base_is_followed_by_the_right_one() -> None:
    pair = Pair.start()
    pair.change(0.02, 7)
    stream = pair.encoder.stream(pair.weights.items(), 1)
    for _ in range(20):
        next(stream)  # and then nobody says how it ended
    pair.change(0.02, 8)
    assert pair.load(2, 1).complete
    assert pair.encoder.stats.deltas > 0
    pair.encoder.commit(2)
    pair.change(0.02, 9)
    assert pair.load(3, 1).complete  # no base of that version
    assert pair.encoder.stats.deltas == 0
    assert_same(pair.weights, pair.targets)


def test_tensors_that_were_not_sent_have_no_base() -> None:
    pair = Pair.start()
    everything, half = pair.weights, dict(list(pair.weights.items())[::2])
    for _ in pair.encoder.stream(half.items(), 1):
        pass
    pair.encoder.commit(2)
    assert pair.encoder.base_nbytes - sum(t.nbytes for t in half.values()) < 200 * len(half)  # deltas of nothing
    sent = [n for n, _ in pair.encoder.stream(everything.items(), 2)]
    assert not {n + MARK for n in everything if n not in half} & set(sent)


def test_a_late_joiner_is_refused_until_it_gets_an_anchor() -> None:
    pair = Pair.start()
    pair.change(0.02, 5)
    pair.targets = {n: torch.zeros_like(t) for n, t in pair.weights.items()}
    with pytest.raises(WrongBaseError, match="other weights here"):
        pair.load(2, 1)
    pair.encoder.rollback()
    assert pair.load(2, None).complete
    pair.encoder.commit(2)
    assert pair.encoder.stats.deltas == 0
    pair.change(0.02, 6)
    assert pair.load(3, 2).complete
    assert pair.encoder.stats.deltas > 0
    assert_same(pair.weights, pair.targets)


def test_a_stale_or_altered_base_is_refused_before_anything_is_written() -> None:
    pair = Pair.start()
    pair.change(0.02, 5)
    for _ in pair.encoder.stream(pair.weights.items(), 1):  # a sync that this receiver missed
        pass
    pair.encoder.commit(2)
    pair.change(0.02, 6)
    before = bits(pair.targets["big"])
    big = [(n, t) for n, t in pair.encoder.stream(pair.weights.items(), 2) if n == "big" + MARK]
    with pytest.raises(WrongBaseError, match="other weights"):
        DeltaDecoder(pair.targets, version=3).load(big)
    assert bits(pair.targets["big"]) == before

    pair = Pair.start()
    pair.change(0.02, 5)
    pair.targets["big"].view(torch.int16)[7, 7] ^= 1  # somebody wrote to the live weights
    with pytest.raises(WrongBaseError, match="the delta of big"):
        pair.load(2, 1)


def test_names_shapes_and_dtypes() -> None:
    pair = Pair.start()
    pair.change(0.02, 9)
    sent = dict(pair.encoder.stream(pair.weights.items(), 1))
    targets, big = pair.targets, ("big" + MARK, sent["big" + MARK])
    report = DeltaDecoder(targets, version=2).load([("typo" + MARK, big[1]), big])
    assert (report.loaded, report.unknown) == (["big"], ["typo"])
    assert set(report.untouched) == set(targets) - {"big"}
    with pytest.raises(CorruptedError, match="big arrived twice"):
        DeltaDecoder(targets, version=2).load([("big", pair.weights["big"]), ("big", pair.weights["big"])])
    targets["big"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match="tensor big is sent as BF16"):
        DeltaDecoder(targets, version=2).load([big])
    with pytest.raises(MismatchError, match=r"sent as \(2,\), and held as \(3,\)"):
        DeltaDecoder(targets, version=2).load([("big", torch.zeros(2))])
    with pytest.raises(MismatchError, match="sent as F32, and the engine holds BF16"):
        DeltaDecoder(targets, version=2).load([("big", torch.zeros(3))])


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
        try:
            DeltaDecoder(target, version=2).load([("w" + MARK, torch.from_numpy(damaged))])
        except (CorruptedError, WrongBaseError, MismatchError):
            continue
        unchanged += 1
        assert bits(target["w"]) == new.tobytes(), seed  # only padding was hit
    assert unchanged < 10
