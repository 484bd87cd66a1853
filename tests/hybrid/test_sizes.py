"""Sizes that do not divide are refused with those that do, and what padding would cost."""

from __future__ import annotations

import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.hybrid.sizes import check_sizes, padding, valid_sizes
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.presets import preset
from rlctl.keys.shapes import tensor_shapes
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.weights import model_weights

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 80, "vocab_size": 131, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_three_parts_on_eight_ranks_are_refused_with_what_is_valid() -> None:
    with pytest.raises(FindingsError) as caught:
        check_sizes(ModelSpec.from_config(CONFIG), 3, 8)
    text = str(caught.value)
    for fault in ("8 attention heads", "80 rows of the feed-forward", "2 key-value heads", "8 ranks"):
        assert f"tp 3 does not divide the {fault}" in text
    assert "valid here: 1, 2, 4, 8" in text
    assert "2 ranks idle" in text


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2-1.5b", "qwen3-0.6b", "llama-3.1-8b"])
def test_valid_sizes_are_those_that_a_layout_can_cut(name: str) -> None:
    spec = preset(name)
    weights = model_weights(spec)

    def cuts(tp: int) -> bool:
        try:
            for weight in weights:
                ParallelLayout(tp=tp).shares(weight)
        except UsageError:
            return False
        return True

    assert valid_sizes(spec, 12) == [tp for tp in (1, 2, 3, 4, 6, 12) if cuts(tp)]


@pytest.mark.parametrize("tp", range(1, 9))
def test_a_padded_model_can_be_cut_and_costs_what_is_said(tp: int) -> None:
    spec = ModelSpec.from_config(CONFIG)
    found = padding(spec, tp, 8)
    wide = ModelSpec.from_config(
        CONFIG
        | {"num_attention_heads": found.heads, "num_key_value_heads": found.kv_heads, "vocab_size": found.vocab,
           "intermediate_size": found.ffn}
    )  # fmt: skip
    assert tp in valid_sizes(wide, tp)

    def elements(model: ModelSpec) -> int:
        return sum(weight.elements for weight in model_weights(model))

    assert found.elements == elements(wide) - elements(spec)
    assert found.nbytes == 2 * found.elements
    norms = 48 * sum("norm" in name for name in tensor_shapes(spec))
    assert found.share == pytest.approx(found.elements / (elements(spec) - norms))
    assert found.idle == 8 % tp
