"""Deltas and merges: the known cases, every layout against a plain formula, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import CheckError, UsageError
from rlctl.keys.lora import arithmetic
from rlctl.keys.lora.arithmetic import LowRank, merge
from rlctl.keys.plan import PlanError
from tests.keys.small_adapters import PREFIX, adapter, merged


def test_delta_of_a_compiled_adapter() -> None:
    tensors = {
        "_orig_mod.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 16),
        "_orig_mod.base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(16, 2),
    }
    one = adapter(tensors, r=2, lora_alpha=8)
    (module,) = one.contents.modules
    assert torch.equal(one.delta(module), torch.full((16, 16), 8.0))


@pytest.mark.parametrize(("rslora", "right"), [(True, [[11, 12], [8, 13]]), (False, [[7, 8], [4, 9]])])
def test_plain_and_rank_stabilised_merge(rslora: bool, right: list[list[int]]) -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.weight": torch.ones(2, 4),
    }
    base = {"q.weight": torch.tensor([[3.0, 4.0], [0.0, 5.0]])}
    got = merged(base, adapter(tensors, r=4, lora_alpha=4, use_rslora=rslora))
    assert torch.equal(got["q.weight"], torch.tensor(right, dtype=torch.float32))
    assert torch.equal(base["q.weight"], torch.tensor([[3.0, 4.0], [0.0, 5.0]]))


def test_dora_merge() -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(1, 2),
        "base_model.model.q.lora_B.weight": torch.ones(2, 1),
        "base_model.model.q.lora_magnitude_vector": torch.tensor([10.0, 20.0]),
    }
    base = {"q.weight": torch.tensor([[3.0, 4.0], [0.0, 5.0]])}
    got = merged(base, adapter(tensors, r=1, lora_alpha=2, use_dora=True))["q.weight"]
    torch.testing.assert_close(got, torch.tensor([[6.4018, 7.6822], [5.4944, 19.2305]]), atol=1e-4, rtol=0)


def test_modules_to_save_replace_the_base_and_nothing_else_does() -> None:
    tensors = {
        "base_model.model.lm_head.original_module.weight": torch.zeros(32, 16),
        "base_model.model.lm_head.modules_to_save.default.weight": torch.full((32, 16), 1.0),
        "base_model.model.lm_head.modules_to_save.ref.weight": torch.full((32, 16), 2.0),
    }
    one = adapter(tensors, r=2, lora_alpha=8, modules_to_save=["lm_head"])
    got = merged({"lm_head.weight": torch.zeros(32, 16)}, one)
    assert torch.equal(got["lm_head.weight"], torch.ones(32, 16))
    live = merged({"base_model.model.lm_head.original_module.weight": torch.zeros(32, 16)}, one)
    assert torch.equal(live["lm_head.weight"], torch.ones(32, 16))


def test_an_untrained_adapter_merges_nothing() -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.weight": torch.zeros(2, 4),
    }
    one = adapter(tensors, r=4, lora_alpha=4)
    assert one.idle_modules() == ["q"]
    with pytest.raises(CheckError, match="nothing merged"):
        merged({"q.weight": torch.ones(2, 2)}, one)
    tiny = {
        "base_model.model.q.lora_A.weight": torch.full((4, 2), 1e-5),
        "base_model.model.q.lora_B.weight": torch.ones(2, 4),
    }
    with pytest.raises(CheckError, match="nothing merged"):
        merged({"q.weight": torch.ones(2, 2, dtype=torch.bfloat16)}, adapter(tiny, r=4, lora_alpha=4))
    assert len(merged({"q.weight": torch.ones(2, 2)}, adapter(tiny, r=4, lora_alpha=4))) == 1


def test_layers_that_the_base_lacks_are_named_with_a_hint() -> None:
    tensors = {
        "base_model.model.model.unembed_tokens.lora_A.weight": torch.ones(4, 2),
        "base_model.model.model.unembed_tokens.lora_B.weight": torch.ones(2, 4),
    }
    with pytest.raises(PlanError, match=r"no model\.unembed_tokens; is it 'lm_head'"):
        merged(
            {"lm_head.weight": torch.ones(2, 2), "model.embed_tokens.weight": torch.ones(2, 2)},
            adapter(tensors, r=4, lora_alpha=4),
        )


def test_another_base_shape_is_refused() -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.weight": torch.ones(2, 4),
    }
    with pytest.raises(PlanError, match=r"is \(3, 2\), but the adapter of q was trained on \(2, 2\)"):
        merged({"q.weight": torch.ones(3, 2)}, adapter(tensors, r=4, lora_alpha=4))


def test_a_tied_head_is_never_changed_through_the_embedding() -> None:
    a, b = torch.randn(2, 8), torch.randn(4, 2)
    base = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.ones(4)}
    old = base["model.embed_tokens.weight"].clone()
    head = adapter(
        {f"{PREFIX}lm_head.lora_A.weight": b.T.contiguous(), f"{PREFIX}lm_head.lora_B.weight": a.T.contiguous()},
        r=2, lora_alpha=2,
    )  # fmt: skip
    at = f"{PREFIX}model.embed_tokens"
    emb = adapter({f"{at}.lora_embedding_A": a, f"{at}.lora_embedding_B": b}, r=2, lora_alpha=2)
    for one in (head, emb):
        with pytest.raises(UsageError, match="ties the head to the embedding"):
            merged(base, one)
    got = merged(base, head, untie=True)
    torch.testing.assert_close(got["lm_head.weight"], old + a.T @ b.T)
    assert torch.equal(got["model.embed_tokens.weight"], old)
    got = merged(base, emb, untie=True)
    assert torch.equal(got["lm_head.weight"], old)
    torch.testing.assert_close(got["model.embed_tokens.weight"], old + (b @ a).T)


def test_trained_and_lora_biases_reach_the_base_bias() -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 4), "base_model.model.q.lora_B.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.bias": torch.full((4,), 3.0),
    }  # fmt: skip
    base = {"q.weight": torch.zeros(4, 4), "q.bias": torch.ones(4)}
    got = merged(base, adapter(tensors, r=2, lora_alpha=4, lora_bias=True))
    assert torch.equal(got["q.bias"], torch.full((4,), 7.0))
    with pytest.raises(PlanError, match=r"no bias at q\.bias"):
        merged({"q.weight": torch.zeros(4, 4)}, adapter(tensors, r=2, lora_alpha=4, lora_bias=True))


def test_quantised_bases_are_refused() -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.weight": torch.ones(2, 4),
    }
    with pytest.raises(UsageError, match="dequantise"):
        merged({"q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, adapter(tensors, r=4, lora_alpha=4))


@pytest.mark.parametrize("init", ["pissa", "olora", "corda", "loftq", "lora_ga"])
def test_adapters_of_a_moved_base_need_that_base(init: str) -> None:
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(4, 2),
        "base_model.model.q.lora_B.weight": torch.ones(2, 4),
    }
    one = adapter(tensors, r=4, lora_alpha=4, init_lora_weights=init)
    with pytest.raises(UsageError, match="changed the base weights"):
        merged({"q.weight": torch.ones(2, 2)}, one)
    assert torch.equal(
        merged({"q.weight": torch.ones(2, 2)}, one, base_is_moved=True)["q.weight"], torch.full((2, 2), 5.0)
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), r=st.integers(1, 5), seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dora=st.sampled_from(["no", "row", "column"]), block=st.sampled_from([1, 7, 64, 1 << 20]),
)  # fmt: skip
def test_blocks_change_nothing(
    rows: int, columns: int, r: int, seed: int, dtype: torch.dtype, dora: str, block: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).to(dtype)
    left, right, scale = torch.randn(rows, r), torch.randn(r, columns), 0.37
    value = weight.double() + scale * left.double() @ right.double()
    magnitude = None
    if dora != "no":
        magnitude = torch.rand(columns if dora == "column" else rows) + 0.5
        norm = value.norm(dim=0 if dora == "column" else 1)
        value = magnitude.double() / norm * value if dora == "column" else (magnitude.double() / norm)[:, None] * value
    saved, arithmetic._SCRATCH_ELEMENTS = arithmetic._SCRATCH_ELEMENTS, block
    try:
        got = merge(weight, [LowRank(left, right, scale)], magnitude=magnitude, per_column=dora == "column")
    finally:
        arithmetic._SCRATCH_ELEMENTS = saved
    assert got.dtype == dtype
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(got.double(), value, atol=1e-5, rtol=step)
