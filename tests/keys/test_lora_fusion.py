"""Adapters of fused layers: the interleave, shared and different A's, experts; forth and back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import UsageError
from rlctl.keys.lora.fusion import (
    Pair,
    alpha_for_rank,
    deinterleave_qkv,
    fuse_gate_up,
    fuse_qkv,
    interleave_qkv,
    pad_rank,
    split_gate_up,
    split_qkv,
    stack_experts,
    unstack_experts,
)

GROUPS = st.integers(1, 4)


def pair(r: int, inputs: int, outputs: int) -> Pair:
    return Pair(torch.randn(r, inputs), torch.randn(outputs, r))


def delta(one: Pair) -> torch.Tensor:
    return one.b @ one.a


def equal(one: Pair, other: Pair) -> bool:
    return torch.equal(one.a, other.a) and torch.equal(one.b, other.b)


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def test_rows_of_the_interleave() -> None:
    q, k, v = column(0, 1, 2, 3), column(10, 11), column(20, 21)
    fused = interleave_qkv(q, k, v, 2)
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert all(torch.equal(a, b) for a, b in zip(deinterleave_qkv(fused, 4, 2), (q, k, v), strict=True))
    many = interleave_qkv(column(0, 1), column(10, 11), column(20, 21), 2)
    assert many.flatten().tolist() == [0, 10, 20, 1, 11, 21]


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="3 groups"):
        interleave_qkv(column(0, 1, 2, 3), column(1, 2), column(1, 2), 3)
    with pytest.raises(UsageError, match="7 rows"):
        deinterleave_qkv(torch.ones(7, 1), 4, 2)
    with pytest.raises(UsageError, match="halve"):
        split_gate_up(fuse_gate_up(pair(1, 2, 3), pair(1, 2, 4)))


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, n=st.integers(1, 4), d=st.integers(1, 5), r=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_qkv_adapters_forth_and_back(groups: int, n: int, d: int, r: int, seed: int) -> None:
    torch.manual_seed(seed)
    heads, inputs = groups * n, 7
    q, k, v = pair(r, inputs, heads * d), pair(r, inputs, groups * d), pair(r, inputs, groups * d)
    fused = fuse_qkv(q, k, v, groups)
    assert fused.blocks == (r, r, r)
    assert all(equal(a, b) for a, b in zip(split_qkv(fused, heads, groups), (q, k, v), strict=True))
    by_units = torch.empty(groups * (n + 2), d, inputs)
    units = [delta(one).reshape(-1, d, inputs) for one in (q, k, v)]
    for g in range(groups):
        by_units[g * (n + 2) : g * (n + 2) + n] = units[0][g * n : (g + 1) * n]
        by_units[g * (n + 2) + n], by_units[g * (n + 2) + n + 1] = units[1][g], units[2][g]
    torch.testing.assert_close(delta(fused.pair), by_units.flatten(0, 1), atol=1e-5, rtol=1e-5)
    shared = [Pair(q.a, one.b) for one in (q, k, v)]
    together = fuse_qkv(*shared, groups, blocks=False)
    assert (together.blocks, together.pair.rank) == ((), r)
    assert all(equal(a, b) for a, b in zip(split_qkv(together, heads, groups), shared, strict=True))


@settings(max_examples=40, deadline=None)
@given(out=st.integers(1, 6), r1=st.integers(1, 4), r2=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_gate_up_adapters_forth_and_back(out: int, r1: int, r2: int, seed: int) -> None:
    torch.manual_seed(seed)
    gate, up = pair(r1, 5, out), pair(r2, 5, out)
    fused = fuse_gate_up(gate, up)
    assert fused.pair.rank == r1 + r2
    assert all(equal(a, b) for a, b in zip(split_gate_up(fused), (gate, up), strict=True))
    torch.testing.assert_close(delta(fused.pair), torch.cat([delta(gate), delta(up)]), atol=1e-5, rtol=1e-5)


def test_different_a_without_blocks_is_refused_and_broken_blocks_are_noticed() -> None:
    gate, up = pair(2, 5, 3), pair(2, 5, 3)
    with pytest.raises(UsageError, match="rank 4"):
        fuse_gate_up(gate, up, blocks=False)
    fused = fuse_gate_up(gate, up)
    fused.pair.b[0, 3] = 1.0
    with pytest.raises(UsageError, match="no longer intact"):
        split_gate_up(fused)


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 12), r=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_expert_adapters_forth_and_back(experts: int, r: int, seed: int) -> None:
    torch.manual_seed(seed)
    pairs = [pair(r, 4, 5) for _ in range(experts)]
    stacked = stack_experts(pairs)
    assert all(equal(a, b) for a, b in zip(unstack_experts(stacked, experts), pairs, strict=True))
    if experts > 1:
        with pytest.raises(UsageError, match="cannot be stacked"):
            stack_experts([*pairs[:-1], pair(r + 1, 4, 5)])
        with pytest.raises(UsageError, match="hold no"):
            unstack_experts(stacked, stacked.rank + 1)


@pytest.mark.parametrize("rslora", [False, True])
def test_scaling_survives_a_change_of_rank(rslora: bool) -> None:
    alpha = alpha_for_rank(16, 8, 24, rslora=rslora)
    assert alpha / (24**0.5 if rslora else 24) == pytest.approx(16 / (8**0.5 if rslora else 8), abs=1e-12)
    one = pair(2, 4, 3)
    assert torch.equal(delta(pad_rank(one, 5)), delta(one))
