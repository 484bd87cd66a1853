"""HF -> Megatron -> HF and v4 -> v5 -> v4, bit for bit, over random configurations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.keys.compose import compose
from rlctl.keys.layout import Layout, TensorInfo
from rlctl.keys.live import convert_tensors, stream_tensors
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.plan import Plan, PlanError
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.megatron import Grid, megatron_layout
from rlctl.keys.schemes.vllm import vllm_layout
from tests.keys.random_models import MOE, REQUIRED, configs, divisors, grids, random_tensors, same_bits

Tensors = dict[str, torch.Tensor]


def infos_of(tensors: Tensors, like: Layout) -> dict:
    return {ref: TensorInfo(tuple(tensors[str(ref)].shape), "BF16") for ref in like.stored if str(ref) in tensors}


def run(plan: Plan, tensors: Tensors) -> Tensors:
    return {str(ref): tensor for ref, tensor in convert_tensors(plan, tensors)}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_hf_to_megatron_and_back_is_exact(data: st.DataObject) -> None:
    spec = ModelSpec.from_config(data.draw(configs((*REQUIRED, "deepseek_v3"))))
    flavour = data.draw(st.sampled_from(["te", "local"]))
    multiple = data.draw(st.sampled_from([1, 8, 128]))
    grid = Grid(**data.draw(grids(spec)), flavour=flavour, vocab_multiple=multiple)
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, data.draw(st.integers(0, 2**31)))
    hf, megatron = hf_layout(spec, shapes), megatron_layout(spec, shapes, grid)

    there = compose(hf, megatron, infos_of(tensors, hf))
    ranks = run(there, tensors)
    assert {str(ref) for ref, stored in megatron.stored.items() if stored.written} == set(ranks)

    back = compose(megatron, hf, infos_of(ranks, megatron))
    again = run(back, ranks)
    assert again.keys() == tensors.keys()
    assert all(same_bits(again[name], tensors[name]) for name in tensors)
    inverse = run(there.inverse(), ranks)
    assert all(same_bits(inverse[name], tensors[name]) for name in tensors)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_replicas_and_aliases_are_made_again_by_the_inverse(data: st.DataObject) -> None:
    config = data.draw(configs((*REQUIRED, "deepseek_v3"))) | {"vocab_size": 12}  # no padding, which would be lost
    spec = ModelSpec.from_config(config)
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, data.draw(st.integers(0, 2**31)))
    hf = hf_layout(spec, shapes)
    megatron = megatron_layout(spec, shapes, Grid(**data.draw(grids(spec)), vocab_multiple=1))
    ranks = run(compose(hf, megatron, infos_of(tensors, hf)), tensors)
    back = compose(megatron, hf, infos_of(ranks, megatron))
    again = run(back.inverse(), run(back, ranks))
    assert again.keys() == ranks.keys()
    assert all(same_bits(again[name], ranks[name]) for name in ranks)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_v4_to_v5_and_back_is_exact(data: st.DataObject) -> None:
    spec = ModelSpec.from_config(data.draw(configs(MOE)))
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, data.draw(st.integers(0, 2**31)))
    v4, v5 = hf_layout(spec, shapes), fused_layout(spec, shapes)
    there = compose(v4, v5, infos_of(tensors, v4))
    stacked = run(there, tensors)
    again = run(compose(v5, v4, infos_of(stacked, v5)), stacked)
    assert again.keys() == tensors.keys()
    assert all(same_bits(again[name], tensors[name]) for name in tensors)
    assert all(same_bits(t, tensors[n]) for n, t in run(there.inverse(), stacked).items())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_vllm_ranks_hold_gives_the_model_back(data: st.DataObject) -> None:
    spec = ModelSpec.from_config(data.draw(configs((*REQUIRED, "deepseek_v3"))))
    vocab = math.ceil(spec.vocab / 64) * 64  # vLLM's rows, which it pads before it deals them out
    width = math.gcd(spec.heads, spec.ffn, spec.moe_ffn or spec.ffn, spec.shared_ffn or spec.ffn, vocab)
    sizes = [n for n in divisors(width) if spec.kv_heads % n == 0 or n % spec.kv_heads == 0]
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, data.draw(st.integers(0, 2**31)))
    hf, ranks = hf_layout(spec, shapes), vllm_layout(spec, shapes, tp=data.draw(st.sampled_from(sizes)))
    held = run(compose(hf, ranks, infos_of(tensors, hf)), tensors)
    again = run(compose(ranks, hf, infos_of(held, ranks)), held)
    assert again.keys() == tensors.keys()
    assert all(same_bits(again[name], tensors[name]) for name in tensors)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_stream_in_any_order_gives_the_same_targets(data: st.DataObject) -> None:
    spec = ModelSpec.from_config(data.draw(configs()))
    shapes = canonical_shapes(spec)
    tensors = random_tensors(shapes, 7)
    hf, megatron = hf_layout(spec, shapes), megatron_layout(spec, shapes, Grid(**data.draw(grids(spec))))
    plan = compose(hf, megatron, infos_of(tensors, hf))
    order = data.draw(st.permutations(list(tensors)))
    streamed = {str(ref): t for ref, t in stream_tensors(plan, ((name, tensors[name]) for name in order))}
    whole = run(plan, tensors)
    assert streamed.keys() == whole.keys()
    assert all(same_bits(streamed[name], whole[name]) for name in whole)


def test_what_is_not_exact_has_no_inverse_and_says_what_is_lost() -> None:
    spec = ModelSpec.from_config(
        {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 4, "vocab_size": 10}
    )  # fmt: skip
    shapes = canonical_shapes(spec)
    hf, megatron = hf_layout(spec, shapes), megatron_layout(spec, shapes, Grid(tp=2, vocab_multiple=8))
    infos = {ref: TensorInfo(stored.shape, "BF16") for ref, stored in megatron.stored.items() if stored.written}
    with pytest.raises(PlanError, match="48 of its elements are in no target") as lost:
        compose(megatron, hf, infos).inverse()
    assert "mp_rank_01:embedding.word_embeddings.weight" in str(lost.value)
    infos = {ref: TensorInfo(stored.shape, "F32") for ref, stored in hf.stored.items()}
    with pytest.raises(PlanError, match="cast from F32 to BF16 loses digits"):
        compose(hf, megatron, infos, dtype="BF16").inverse()
    compose(hf, megatron, infos, dtype="F64").inverse()
