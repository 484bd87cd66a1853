"""Adapters alone, update after update, leave the engine with the very bits of a merged update."""

import random
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.errors import RlctlError
from rlctl.keys.plan import PlanError
from rlctl.model.lora import LoraEngine
from rlctl.rollout.adapter_updates import AdapterUpdates
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from rlctl.sync.member import described

CONFIG = LlamaConfig(
    vocab_size=67, hidden_size=48, num_hidden_layers=2, intermediate_size=80, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def trainer(request) -> LoraEngine:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    dtype = getattr(request, "param", "float32")
    lora, model = LoraConfig(rank=4, target_modules=["q_proj", "down_proj"]), AutoModelForCausalLM.from_config(CONFIG)
    return LoraEngine(model, OptimizerConfig(), lora=lora, seed=seed, base="none", dtype=dtype)


def served(dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine(CONFIG, dtype=dtype, max_slots=4, max_length=32)


def move(trainer: LoraEngine) -> None:
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("trainer", ["float32", "bfloat16"], indirect=True)
def test_adapter_updates_equal_merged_ones_bit_for_bit(trainer):
    dtype = next(trainer.per_tensor_params())[1].dtype
    merged, engine = served(dtype), served(dtype)
    updates = AdapterUpdates(engine, trainer.adapter_config)
    assert updates.load_base(trainer.base_params(), 0).complete
    for version in (1, 2, 3):
        if version < 3:  # the third brings the second's adapter again: nothing may be added twice
            move(trainer)
        report = updates.load_adapter(trainer.adapter_params(), version)
        assert report.complete and len(report.loaded) == 8
        merged.load_weights(trainer.per_tensor_params(), version)
        assert engine.digests() == merged.digests()
        assert engine.version == version


def test_a_stream_may_bring_base_and_adapter_and_what_is_held_is_read_back(trainer):
    engine, merged = served(), served()
    updates = AdapterUpdates(engine, trainer.adapter_config)
    assert not updates.holds_base
    move(trainer)
    report = updates.load_weights(chain(trainer.base_params(), trainer.adapter_params()), 1)
    merged.load_weights(trainer.per_tensor_params(), 1)
    assert report.complete and updates.holds_base and engine.digests() == merged.digests()
    sent = {name: described(name, t) for name, t in chain(trainer.base_params(), trainer.adapter_params())}
    assert updates.digests() == sent
    move(trainer)
    assert updates.load_weights(trainer.adapter_params(), 2).complete
    merged.load_weights(trainer.per_tensor_params(), 2)
    assert engine.digests() == merged.digests()
    name = "model.layers.1.self_attn.q_proj.weight"
    engine.load_weights([(name, dict(trainer.base_params())[name])], 3)  # behind its back
    with pytest.raises(RlctlError, match=f"sum of base and adapter at {name}"):
        updates.digests([n for n, _ in trainer.adapter_params()])


def test_modules_that_an_adapter_leaves_out_go_back_to_the_base(trainer):
    engine, plain = served(), served()
    updates = AdapterUpdates(engine, trainer.adapter_config)
    updates.load_base(trainer.base_params(), 0)
    plain.load_weights(trainer.base_params(), 0)
    move(trainer)
    updates.load_adapter(trainer.adapter_params(), 1)
    updates.load_adapter(((n, t) for n, t in trainer.adapter_params() if "q_proj" in n), 2)
    differ = {name for name, value in engine.digests().items() if value != plain.digests()[name]}
    assert differ == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}


def test_without_a_base_or_with_an_adapter_that_does_not_fit_nothing_is_loaded(trainer):
    engine = served()
    updates = AdapterUpdates(engine, trainer.adapter_config)
    with pytest.raises(RlctlError, match="no base"):
        updates.load_adapter(trainer.adapter_params(), 1)
    updates.load_base(trainer.base_params(), 0)
    before = engine.digests()
    odd = ((name.replace("layers.1", "layers.7"), tensor) for name, tensor in trainer.adapter_params())
    with pytest.raises(PlanError, match="does not fit"):
        updates.load_adapter(odd, 1)
    assert engine.digests() == before and engine.version == 0
    engine.sleep(2)
    engine.wake()
    with pytest.raises(RlctlError, match="no base"):
        updates.load_adapter(trainer.adapter_params(), 1)
