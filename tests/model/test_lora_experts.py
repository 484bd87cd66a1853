"""Adapters on experts that are stacked in one parameter: trained, merged, sent, loaded in PEFT, gone on from."""

from copy import deepcopy
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from rlctl.errors import UsageError
from rlctl.model.reference import ReferenceModel
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.rollout.embedded.engine import EmbeddedEngine
from tests.model.lora_engines import begin, engine, trained
from tests.model.tiny import SMALL, VOCAB, logprobs_of, random_rows

EXPERTS = {
    "qwen3-moe": Qwen3MoeConfig(
        vocab_size=VOCAB, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        head_dim=8, **SMALL,
    ),
    "mixtral": MixtralConfig(vocab_size=VOCAB, intermediate_size=24, num_local_experts=4, **SMALL),
}  # fmt: skip
ATTENTION = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}


@pytest.mark.parametrize(
    ("kind", "targets", "due"),
    [
        ("qwen3-moe", ["all-linear"], {*ATTENTION, "gate_up_proj", "down_proj", "gate.weight"}),
        ("mixtral", ["all-linear"], {*ATTENTION, "gate_up_proj", "down_proj", "gate.weight"}),
        ("qwen3-moe", ["q_proj", "gate_up_proj"], {"q_proj.weight", "gate_up_proj"}),
        ("mixtral", ["layers.1.mlp.experts.down_proj"], {"down_proj"}),
    ],
)
def test_stacked_experts_are_trained_and_merged_and_served(kind, targets, due, tmp_path, seed):
    from peft import PeftModel

    AutoModelForCausalLM.from_config(EXPERTS[kind]).save_pretrained(tmp_path)
    one, rows = trained(tmp_path, *targets), random_rows()
    mine = one.log_probs(rows, temperature=1.0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    apart = ReferenceModel(deepcopy(plain), dtype="float32", micro_batch_tokens=8192)
    for switched, separate in zip(
        one.bare_base().log_probs(rows, temperature=1.0), apart.log_probs(rows, temperature=1.0), strict=True
    ):
        assert np.array_equal(switched, separate)
    weights, merged = dict(plain.named_parameters()), dict(one.per_tensor_params())
    changed = [name for name in weights if not torch.equal(merged[name], weights[name])]
    assert merged.keys() == weights.keys()
    assert {next(end for end in due if name.endswith(f".{end}")) for name in changed} == due
    assert len(changed) == 1 if "layers.1" in targets[0] else len(changed) == 2 * len(due)
    one.save_pretrained(tmp_path / "final")
    loaded = PeftModel.from_pretrained(deepcopy(plain), tmp_path / "final")
    plain.load_state_dict(merged)
    for served in (logprobs_of(loaded, rows), logprobs_of(plain, rows)):
        assert max(np.abs(a - b).max() for a, b in zip(mine, served, strict=True)) < 1e-5
    # Adapters alone come to the same bits.
    engines = [EmbeddedEngine(EXPERTS[kind], dtype=torch.float32, max_slots=4, max_length=32) for _ in range(2)]
    updates = AdapterUpdates(engines[0], one.adapter_config, experts=one.experts)
    assert updates.load_weights(chain(one.base_params(), one.adapter_params()), 1).complete
    assert engines[1].load_weights(merged.items(), 1).complete
    assert engines[0].digests() == engines[1].digests()
    assert begin(tmp_path, tmp_path / "final", *targets).params_digest() == one.params_digest()


def test_names_that_peft_takes_for_experts_alone_are_refused(tmp_path, seed):
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        head_dim=8, mlp_only_layers=[0], **SMALL,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"PEFT puts no adapter on model\.layers\.0\.mlp\.down_proj"):
        engine(tmp_path, "down_proj")
    with pytest.raises(UsageError, match="PEFT does not take these modules"):
        engine(tmp_path, "up_proj")
