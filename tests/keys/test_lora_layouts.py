"""Deltas of every layout, stacked experts among them, and merges in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlctl.errors import UsageError
from rlctl.keys.ahead import DEPTH, ahead
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.families import FAMILIES
from rlctl.keys.layout import TensorInfo
from rlctl.keys.lora import merge as merge_module
from rlctl.keys.lora.arithmetic import embedding_delta, experts_delta, linear_delta
from rlctl.keys.lora.merge import Merger, merge_stream
from rlctl.keys.lora.merge_plan import plan_merge
from rlctl.keys.plan import PlanError
from tests.keys.small_adapters import PREFIX, adapter, merged


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 12),
    r=st.integers(1, 3),
    out=st.integers(1, 5),
    inputs=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_stacked_experts_are_laid_out_as_peft_lays_them_out(
    experts: int, r: int, out: int, inputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = torch.randn(experts * r, inputs), torch.randn(out, experts * r)
    by_peft = torch.einsum("o r e, e r i -> e o i", b.reshape(out, r, experts), a.reshape(experts, r, inputs)) * 0.5
    torch.testing.assert_close(experts_delta(a, b, 0.5, experts), by_peft)
    torch.testing.assert_close(experts_delta(a, b, 0.5, experts, transposed=True), by_peft.transpose(1, 2))
    assert experts_delta(a, b, 0.5, experts)[experts - 1, 0, 0] == pytest.approx(
        0.5 * sum(float(b[0, k * experts + experts - 1] * a[(experts - 1) * r + k, 0]) for k in range(r)), abs=1e-5
    )


def test_deltas_of_the_other_layouts() -> None:
    a, b = torch.randn(2, 7), torch.randn(5, 2)
    torch.testing.assert_close(linear_delta(a, b, 2.0), 2 * b @ a)
    torch.testing.assert_close(linear_delta(a, b, 2.0, transposed=True), (2 * b @ a).T)
    assert embedding_delta(a, b, 2.0).shape == (7, 5)
    assert linear_delta(a.bfloat16(), b.bfloat16(), 1.0).dtype == torch.float32


def test_every_pairing_of_stacked_and_single_experts_merges_alike() -> None:
    torch.manual_seed(5)
    experts, inner, hidden, r = 11, 6, 4, 2
    moe = FAMILIES["mixtral"].experts
    path = "model.layers.0.mlp.experts"
    a, b = torch.randn(experts * r, hidden), torch.randn(2 * inner, experts * r)
    a2, b2 = torch.randn(experts * r, inner), torch.randn(hidden, experts * r)
    stacked = adapter(
        {f"{PREFIX}{path}.base_layer.lora_A.weight": a, f"{PREFIX}{path}.base_layer.lora_B.weight": b,
         f"{PREFIX}{path}.lora_A.weight": a2, f"{PREFIX}{path}.lora_B.weight": b2},
        r=r, lora_alpha=3, target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    single_tensors = {}
    for e in range(experts):
        mine = [k * experts + e for k in range(r)]
        for part, (one_a, one_b) in {
            "w1": (a[e * r : (e + 1) * r], b[:inner, mine]), "w3": (a[e * r : (e + 1) * r], b[inner:, mine]),
            "w2": (a2[e * r : (e + 1) * r], b2[:, mine]),
        }.items():  # fmt: skip
            at = f"{PREFIX}model.layers.0.block_sparse_moe.experts.{e}.{part}"
            single_tensors |= {f"{at}.lora_A.weight": one_a.contiguous(), f"{at}.lora_B.weight": one_b.contiguous()}
    single = adapter(single_tensors, r=r, lora_alpha=3)
    fused = {
        f"{path}.gate_up_proj": torch.randn(experts, 2 * inner, hidden),
        f"{path}.down_proj": torch.randn(experts, hidden, inner),
    }
    apart = {}
    for e in range(experts):
        at = f"model.layers.0.block_sparse_moe.experts.{e}"
        gate_up = fused[f"{path}.gate_up_proj"][e]
        apart |= {
            f"{at}.w1.weight": gate_up[:inner],
            f"{at}.w3.weight": gate_up[inner:],
            f"{at}.w2.weight": fused[f"{path}.down_proj"][e],
        }
    right = {
        f"{path}.gate_up_proj": fused[f"{path}.gate_up_proj"] + experts_delta(a, b, 1.5, experts),
        f"{path}.down_proj": fused[f"{path}.down_proj"] + experts_delta(a2, b2, 1.5, experts),
    }
    for one in (stacked, single):
        got = merged(fused, one, moe=moe)
        for name, value in right.items():
            torch.testing.assert_close(got[name], value)
        got = merged(apart, one, moe=moe)
        for e in range(experts):
            at = f"model.layers.0.block_sparse_moe.experts.{e}"
            torch.testing.assert_close(got[f"{at}.w1.weight"], right[f"{path}.gate_up_proj"][e, :inner])
            torch.testing.assert_close(got[f"{at}.w3.weight"], right[f"{path}.gate_up_proj"][e, inner:])
            torch.testing.assert_close(got[f"{at}.w2.weight"], right[f"{path}.down_proj"][e])
    del apart["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    with pytest.raises(PlanError, match="expert 3"):
        merged(apart, stacked, moe=moe)
    with pytest.raises(UsageError, match=r"config\.json"):
        merged(fused, stacked)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    elements=st.sampled_from([1, 5, 20, 1 << 20]), seed=st.integers(0, 999),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2), kind=st.sampled_from(["", "dora"]),
)  # fmt: skip
def test_pieces_made_ahead_fill_the_same_tensors(
    shapes: list[tuple[int, int]], elements: int, seed: int, dtypes: tuple[torch.dtype, torch.dtype], kind: str
) -> None:
    torch.manual_seed(seed)
    base, tensors = {}, {}
    for i, (rows, columns) in enumerate(shapes):
        base[f"m{i}.weight"] = torch.randn(rows, columns).to(dtypes[0])
        tensors[f"base_model.model.m{i}.lora_A.weight"] = torch.randn(2, columns)
        tensors[f"base_model.model.m{i}.lora_B.weight"] = torch.randn(rows, 2)
        if kind:
            tensors[f"base_model.model.m{i}.lora_magnitude_vector"] = torch.rand(rows) + 0.5
    base["m.experts.down_proj"] = torch.randn(3, 4, 5).to(dtypes[0])
    tensors["base_model.model.m.experts.lora_A.weight"] = torch.randn(6, 5)
    tensors["base_model.model.m.experts.lora_B.weight"] = torch.randn(4, 6)
    if kind:
        del base["m.experts.down_proj"]
        tensors = {n: t for n, t in tensors.items() if "experts" not in n}
    one = adapter(tensors, r=2, lora_alpha=3, use_dora=bool(kind), target_parameters=["experts.down_proj"])
    moe = FAMILIES["qwen3_moe"].experts
    plan = plan_merge(one.contents, one.config, {n: tuple(t.shape) for n, t in base.items()}, moe=moe)
    right = dict(merge_stream(base.items(), one, plan, dtype=dtypes[1]))
    merger = Merger(one, plan, dtype=dtypes[1])

    def runs() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in base.items():
            info = TensorInfo(tuple(tensor.shape), dtype_code(tensor.dtype))
            read = partial(_copy_out, tensor)
            for run in merger.pieces(name, info, read, ring=DEPTH + 1):
                yield name, run

    before, merge_module.PIECE_ELEMENTS = merge_module.PIECE_ELEMENTS, elements
    found: dict[str, list[Tensor]] = {}
    try:
        with ThreadPoolExecutor(1) as pool:
            for name, run in ahead(runs(), pool):
                found.setdefault(name, []).append(run.flatten().clone())
    finally:
        merge_module.PIECE_ELEMENTS = before
    merger.finish()
    step = 1e-6 if torch.float32 == dtypes[1] else 2**-7
    for name, value in right.items():
        whole = torch.cat(found[name]).view(value.shape)
        torch.testing.assert_close(whole, value, atol=1e-5, rtol=step, msg=name)


def _copy_out(tensor: Tensor, first: int, out: Tensor) -> None:
    out.view(-1).copy_(tensor.reshape(-1)[first : first + out.numel()])
