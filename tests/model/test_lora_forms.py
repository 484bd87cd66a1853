"""Rank-stabilised LoRA and DoRA: what PEFT computes, merged, sent alone, switched off and gone on from."""

import random
from copy import deepcopy
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.errors import UsageError
from rlctl.model.reference import ReferenceModel
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.rollout.embedded.engine import EmbeddedEngine
from tests.model.lora_engines import begin, engine, trained
from tests.model.test_lora_experts import EXPERTS
from tests.model.tiny import CONFIGS, logprobs_of, random_rows

FORMS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "both": {"use_dora": True, "use_rslora": True},
}


@pytest.mark.parametrize(
    ("kind", "form"), [("llama-tied", "rslora"), ("llama-tied", "both"), ("qwen2-untied", "dora"), ("gpt2", "dora")]
)
def test_it_is_pefts_and_comes_to_the_same_bits_by_every_way(kind, form, tmp_path):
    from peft import PeftModel

    seed = random.randrange(1 << 30)
    print("seed", seed)
    random.seed(seed)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    one, rows = trained(tmp_path, **FORMS[form]), random_rows()
    mine = one.log_probs(rows, temperature=1.0)
    # PEFT's forward pass, and its own merge.
    one.save_pretrained(tmp_path / "final")
    loaded = PeftModel.from_pretrained(deepcopy(plain), tmp_path / "final")
    assert max(np.abs(a - b).max() for a, b in zip(mine, logprobs_of(loaded, rows), strict=True)) < 1e-5
    merged, theirs = dict(one.per_tensor_params()), dict(loaded.merge_and_unload().named_parameters())
    assert merged.keys() == theirs.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=0, atol=1e-6)
    plain_scale = engine(tmp_path, **{**FORMS[form], "use_rslora": not FORMS[form].get("use_rslora", False)})
    plain_scale.model.load_state_dict(one.model.state_dict())
    other = dict(plain_scale.per_tensor_params())
    assert any((merged[name] - other[name]).abs().max() > 1e-3 for name in merged)  # the scale is the form's
    # Adapters alone, the base alone, and going on.
    engines = [EmbeddedEngine(CONFIGS[kind], dtype=torch.float32, max_slots=4, max_length=32) for _ in range(2)]
    updates = AdapterUpdates(engines[0], one.adapter_config)
    for version in (1, 2):
        assert updates.load_weights(chain(one.base_params(), one.adapter_params()), version).complete
    assert engines[1].load_weights(merged.items(), 1).complete
    assert engines[0].digests() == engines[1].digests()
    updates.digests()
    apart = ReferenceModel(deepcopy(plain), dtype="float32", micro_batch_tokens=8192)
    for switched, separate in zip(
        one.bare_base().log_probs(rows, temperature=1.0), apart.log_probs(rows, temperature=1.0), strict=True
    ):
        assert np.array_equal(switched, separate)
    assert begin(tmp_path, tmp_path / "final", **FORMS[form]).params_digest() == one.params_digest()


def test_magnitudes_are_trained(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["llama-tied"]).save_pretrained(tmp_path)
    first, after = (trained(tmp_path, updates=updates, use_dora=True).state()["params"] for updates in (0, 3))
    lengths = [name for name in first if "magnitude" in name]
    assert len(lengths) == 14 and all(not torch.equal(first[name], after[name]) for name in lengths)


def test_dora_on_stacked_experts_is_refused_by_name(tmp_path):
    AutoModelForCausalLM.from_config(EXPERTS["mixtral"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="use_dora"):
        engine(tmp_path, "gate_up_proj", use_dora=True)
