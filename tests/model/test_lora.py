"""LoRA: the adapter alone learns, rollouts get sound merged weights, and what is saved is what PEFT and vLLM load."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.errors import FindingsError, RlctlError, UsageError
from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.export import entries, for_target
from rlctl.keys.model_spec import ModelSpec
from rlctl.model.local import LocalEngine
from rlctl.model.locate import find_model
from rlctl.model.reference import ReferenceModel
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.schema.training import OptimizerConfig
from tests.model.lora_engines import begin, engine, trained
from tests.model.tiny import CONFIGS, LOSS, SMALL, VOCAB, logprobs_of, random_rows
from tests.warm_starts import run_module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for kind, config in CONFIGS.items():
        torch.manual_seed(0)
        found[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_saved_adapter_gives_the_trainers_log_probs_in_peft(kind, folders, tmp_path, seed):
    from peft import PeftModel

    one, rows = trained(folders[kind]), random_rows()
    one.save_pretrained(tmp_path / "final")
    base = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    before = logprobs_of(base, rows)
    loaded = PeftModel.from_pretrained(base, tmp_path / "final")
    after = logprobs_of(loaded, rows)
    mine = one.log_probs(rows, temperature=1.0)
    assert max(np.abs(a - b).max() for a, b in zip(mine, after, strict=True)) < 1e-5
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-2
    # Without float32's rounding in between they are one function.
    one.model.double()
    mine, after = one.log_probs(rows, temperature=1.0), logprobs_of(loaded.double(), rows)
    assert max(np.abs(a - b).max() for a, b in zip(mine, after, strict=True)) < 1e-6


@pytest.mark.parametrize("kind", CONFIGS)
def test_merged_weights_are_pefts_own_and_the_base_does_not_change(kind, folders, seed):
    one = engine(folders[kind])
    plain = dict(AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).named_parameters())
    first = dict(one.per_tensor_params())
    assert first.keys() == plain.keys()
    assert all(torch.equal(first[name], plain[name]) for name in plain)  # B is zero
    for _ in range(3):
        one.update(random_rows(), LOSS)
    merged = dict(one.per_tensor_params())
    again = dict(one.per_tensor_params())
    assert all(torch.equal(merged[name], again[name]) for name in merged)  # the scale counts once, however often
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed and all("norm" not in name and "ln_" not in name and "embed" not in name for name in changed)
    for path, layer in one.model.named_modules():
        if hasattr(layer, "lora_A"):
            expected = layer.base_layer.weight + layer.get_delta_weight("default")
            assert torch.equal(layer.base_layer.weight, plain[f"{path}.weight"])
            torch.testing.assert_close(merged[f"{path}.weight"], expected, rtol=0, atol=1e-6)
            changed.discard(f"{path}.weight")
    assert not changed


def test_bfloat16_is_cast_once_from_float32_sums(folders, seed):
    one = trained(folders["llama-tied"], dtype="bfloat16")
    merged = dict(one.per_tensor_params())
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    path = "model.layers.0.mlp.up_proj"
    layer = one.model.get_submodule(path)
    product = layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()
    exact = layer.base_layer.weight.detach() + layer.scaling["default"] * product
    # Sums may differ in their last float32 bit: at a rounding boundary that is one bfloat16 step, and rare.
    assert (merged[f"{path}.weight"] == exact.to(torch.bfloat16)).float().mean() > 0.99


def test_the_embedded_engine_serves_the_trainers_policy(folders, seed):
    one = trained(folders["qwen2-untied"])
    served = EmbeddedEngine(one.model.config, dtype=torch.float32, max_slots=4, max_length=32)
    for version in (1, 2):
        assert served.load_weights(one.per_tensor_params(), version).complete
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2-untied"])
    model.load_state_dict(dict(one.per_tensor_params()), strict=False)
    rows = random_rows()
    for a, b in zip(one.log_probs(rows, temperature=1.0), logprobs_of(model, rows), strict=True):
        assert np.abs(a - b).max() < 1e-5
    served.close()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama-tied", "float32"), ("llama-tied", "bfloat16"), ("gpt2", "float32")]
)
def test_the_bare_base_scores_as_a_model_of_its_own_bit_for_bit(kind, dtype, folders, seed):
    one, other = (trained(folders[kind], dtype=dtype) for _ in range(2))
    base = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    apart = ReferenceModel(base, dtype=dtype, micro_batch_tokens=8192)
    bare, rows = one.bare_base(), random_rows()
    policy = one.log_probs(rows, temperature=0.7)
    for switched, separate in zip(
        bare.log_probs(rows, temperature=0.7), apart.log_probs(rows, temperature=0.7), strict=True
    ):
        assert np.array_equal(switched, separate)
    # The policy is what it was, and learns as one that was never switched off.
    assert all(np.array_equal(a, b) for a, b in zip(policy, one.log_probs(rows, temperature=0.7), strict=True))
    one.load(other.state())
    one.update(rows, LOSS)
    other.update(rows, LOSS)
    assert one.params_digest() == other.params_digest()
    assert bare._engine is one  # no tensor is held twice


def test_state_holds_the_adapter_alone_and_comes_back_bit_for_bit(folders, seed):
    batches = [random_rows() for _ in range(4)]
    one = engine(folders["llama-tied"])
    for batch in batches[:2]:
        one.update(batch, LOSS)
    saved = {k: ({n: t.clone() for n, t in v.items()} if isinstance(v, dict) else v) for k, v in one.state().items()}
    assert all("lora_" in name for name in saved["params"])
    other = engine(folders["llama-tied"], seed=5)
    other.load(saved)
    for batch in batches[2:]:
        one.update(batch, LOSS)
        other.update(batch, LOSS)
    assert one.params_digest() == other.params_digest()
    assert one.params_digest() != engine(folders["llama-tied"]).params_digest()


def test_an_adapter_of_other_weights_or_of_another_rank_is_refused(folders, tmp_path):
    saved = engine(folders["llama-tied"]).state()
    model = AutoModelForCausalLM.from_pretrained(folders["llama-tied"])
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path)
    with pytest.raises(RlctlError, match="trained on other weights"):
        engine(tmp_path).load(saved)
    # Rank 1 fits into rank 4 by broadcasting, which would be worse than an error.
    with pytest.raises(RlctlError, match="differ"):
        engine(folders["llama-tied"], rank=1).load(saved)
    with pytest.raises(RlctlError, match="differ"):
        engine(folders["llama-tied"]).load(engine(folders["llama-tied"], rank=1).state())
    with pytest.raises(RlctlError, match="differ"):
        engine(folders["llama-tied"], "q_proj").load(saved)
    whole = LocalEngine(AutoModelForCausalLM.from_pretrained(folders["llama-tied"]), OptimizerConfig())
    with pytest.raises(RlctlError, match="holds a whole model"):
        engine(folders["llama-tied"]).load(whole.state())
    with pytest.raises(ValueError, match="differ"):
        whole.load(saved)


def test_first_values_depend_on_the_seed_alone(folders):
    torch.manual_seed(3)
    one = engine(folders["llama-tied"])
    state = torch.get_rng_state()
    other = engine(folders["llama-tied"])
    assert torch.equal(state, torch.get_rng_state())
    assert one.params_digest() == other.params_digest()
    assert one.params_digest() != engine(folders["llama-tied"], seed=2).params_digest()


def test_the_saved_adapter_is_as_vllm_wants_it(folders, tmp_path, seed):
    trained(folders["qwen2-untied"]).save_pretrained(tmp_path / "final")
    spec = ModelSpec.from_folder(folders["qwen2-untied"])
    with Adapter.open(tmp_path / "final") as adapter:
        assert adapter.config.target_modules == (
            "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
        )  # fmt: skip
        assert adapter.config.base_model_name_or_path == str(folders["qwen2-untied"])
        wanted = dict(entries(for_target(adapter, "vllm-lora", spec=spec), "vllm-lora"))
        found = dict(entries(adapter, "peft-file"))
        assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert not adapter.idle_modules()


def test_targets_are_taken_by_the_ends_of_their_names(folders, seed):
    one = trained(folders["qwen2-untied"], "q_proj", "layers.1.mlp.up_proj", "lm_head")
    adapted = {name.partition(".lora_")[0] for name in one.state()["params"]}
    assert adapted == {
        "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj",
    }  # fmt: skip


def test_targets_that_cannot_be_are_refused(folders):
    with pytest.raises(UsageError, match="q_prj") as caught:
        engine(folders["llama-tied"], "q_prj", "v_proj")
    assert "is it 'q_proj'?" in str(caught.value) and "all-linear" in str(caught.value)
    with pytest.raises(UsageError, match="ties the head"):
        engine(folders["llama-tied"], "lm_head")


def test_an_adapter_of_pefts_own_for_a_model_of_another_name_is_refused(folders, tmp_path, seed):
    final = tmp_path / "final"
    trained(folders["llama-tied"]).save_pretrained(final)
    (final / "base_model.json").unlink()
    settings = json.loads((final / "adapter_config.json").read_text())
    (final / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "org/other"}))
    with pytest.raises(FindingsError, match="says that it was trained on org/other"):
        begin(folders["llama-tied"], final)


def test_a_folder_with_an_adapter_is_no_model_and_says_how_to_make_it_one(folders, tmp_path, seed):
    final, merged = tmp_path / "final", tmp_path / "merged"
    one, rows = trained(folders["qwen2-untied"]), random_rows()
    one.save_pretrained(final)
    with pytest.raises(UsageError, match="is an adapter") as caught:
        find_model(str(final))
    words = str(caught.value.fix).partition("rlctl ")[2].split()
    places = {"BASE": str(folders["qwen2-untied"]), "MERGED": str(merged)}
    done = run_module("rlctl", [places.get(word, word) for word in words], timeout=60)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    for a, b in zip(one.log_probs(rows, temperature=1.0), logprobs_of(model, rows), strict=True):
        assert np.abs(a - b).max() < 1e-5


def test_training_begins_with_an_adapter_that_was_trained_before(folders, tmp_path, seed):
    one, rows = trained(folders["llama-tied"]), random_rows()
    one.save_pretrained(tmp_path / "final")
    other = begin(folders["llama-tied"], tmp_path / "final")
    assert other.params_digest() == one.params_digest()
    assert other.state()["updates"] == 0
    assert other.update(rows, LOSS).metrics["grad_norm"] > 0
    assert other.params_digest() != one.params_digest()


def test_an_adapter_of_pefts_own_is_begun_with(folders, tmp_path, seed):
    import peft

    base = AutoModelForCausalLM.from_pretrained(folders["gpt2"], dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    theirs, rows = peft.get_peft_model(base, config), random_rows()
    theirs.save_pretrained(tmp_path)
    mine = begin(folders["gpt2"], tmp_path, "c_attn").log_probs(rows, temperature=1.0)
    assert max(np.abs(a - b).max() for a, b in zip(mine, logprobs_of(theirs, rows), strict=True)) < 1e-5


def test_an_adapter_for_another_model_or_of_another_form_is_refused(folders, tmp_path, seed):
    final = tmp_path / "final"
    trained(folders["llama-tied"]).save_pretrained(final)
    cases = [
        (("qwen2-untied",), {}, "other weights"),
        (("llama-tied",), {"rank": 8}, r"set model\.lora\.rank=4 model\.lora\.alpha=16"),
        (("llama-tied",), {"alpha": 8.0}, r"set model\.lora\.rank=4 model\.lora\.alpha=16"),
        (("llama-tied", "q_proj"), {}, r"target_modules: its modules are others"),
        (("gpt2",), {}, "its modules are others"),
    ]
    for (kind, *targets), settings, message in cases:
        with pytest.raises(FindingsError) as caught:
            begin(folders[kind], final, *targets, **settings)
        assert re.search(message, str(caught.value)), str(caught.value)
    (final / "base_model.json").unlink()  # as PEFT writes an adapter: shapes alone can tell
    wide = LlamaConfig(vocab_size=VOCAB, intermediate_size=64, **SMALL)
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    with pytest.raises(FindingsError, match="made for this model"):
        begin(tmp_path / "wide", final)
    with pytest.raises(UsageError, match="does not exist"):
        begin(folders["llama-tied"], tmp_path / "nowhere")


def test_an_adapter_of_a_form_that_is_not_trained_is_refused(folders, tmp_path):
    import peft

    base = AutoModelForCausalLM.from_pretrained(folders["llama-tied"], dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    with pytest.raises(FindingsError, match="not one that is trained: init_lora_weights='pissa'"):
        begin(folders["llama-tied"], tmp_path, "q_proj")
