"""The colocated sync with a real model and a real engine: its order, and that success means every weight."""

import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlctl.errors import RlctlError
from rlctl.experience.segments import RequestKey
from rlctl.model.local import LocalEngine
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.schema.training import OptimizerConfig
from rlctl.sync.colocated import PHASES, ColocatedSync
from rlctl.sync.report import SyncError

CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


class Odd(LocalEngine):
    """Hands out its weights with a fault."""

    fault = ""

    def per_tensor_params(self):
        for index, (name, tensor) in enumerate(super().per_tensor_params()):
            if self.fault == "missing" and index == 3:
                continue
            if self.fault == "unknown" and index == 3:
                yield "model.layers.9.nothing.weight", tensor
            if self.fault == "raise" and index == 3:
                raise RuntimeError("the trainer broke")
            if self.fault == "slow":
                time.sleep(0.05)
            yield name, tensor[:-1] if self.fault == "shape" and index == 3 else tensor


class Forgetful(ROLLOUT_ENGINES.load("transformers")):
    """Some of its tensors are otherwise than they were sent."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forgets, self.asked = [], 0

    def load_weights(self, stream, version):
        report = super().load_weights(stream, version)
        for name, tensor in self._awake_weights().items():
            if name in self.forgets:
                tensor.detach().view(-1)[:1] += 1
        return report

    def digests(self, names=None):
        self.asked += len(list(names))
        return super().digests(names)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Odd(AutoModelForCausalLM.from_config(CONFIG), OptimizerConfig())
    engine = ROLLOUT_ENGINES.load("transformers")(CONFIG, dtype=torch.float32, max_slots=4, max_length=32)
    phases: list[tuple[str, str]] = []
    sync = ColocatedSync(model, [engine], timeout=0.2, on_phase=lambda name, s, error: phases.append((name, error)))
    yield model, engine, sync, phases
    engine.close()


def generate(engine):
    request = Request(RequestKey(0, 0), (1, 2, 3), SamplingParams(max_new_tokens=4, temperature=0.0), seed=1)
    return engine.generate([request])[0]


def test_phases_run_in_order_and_the_engine_serves_the_new_weights(pair):
    model, engine, sync, phases = pair
    report = sync.sync(1)
    assert [name for name, _ in phases] == list(PHASES)
    assert report.version == 1 and set(report.phases) == set(PHASES)
    names = dict(model.per_tensor_params())
    assert report.tensors == len(names)
    assert report.bytes == sum(t.numel() * 4 for t in names.values())
    first = generate(engine)
    assert first.segments[0].version == 1
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    engine.sleep(2)
    sync.sync(2)
    second = generate(engine)
    assert second.segments[0].version == 2
    logits = model.model(torch.tensor([[1, 2, 3]])).logits[0, -1].detach()
    assert second.token_ids[0] == int(logits.argmax())
    assert abs(second.logprobs[0] - float(logits.log_softmax(-1).max())) < 1e-5
    assert second.logprobs != first.logprobs


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_engine_holds_is_read_back(verify, dtype):
    torch.manual_seed(0)
    model = LocalEngine(AutoModelForCausalLM.from_config(CONFIG), OptimizerConfig())
    engine = Forgetful(CONFIG, dtype=dtype, max_slots=4, max_length=32)
    sync = ColocatedSync(model, [engine], timeout=20, on_phase=lambda *_: None, verify=verify)
    sync.sync(1)
    names = list(dict(model.per_tensor_params()))
    assert engine.asked in {"full": [len(names)], "sampled": [1, 2], "off": [0]}[verify]
    engine.forgets = names
    if verify != "off":
        count = len(names) if verify == "full" else "[12]"
        with pytest.raises(SyncError, match=f"holds {count} tensors otherwise than they were sent") as caught:
            sync.sync(2)
        assert caught.value.fenced == [engine.replica]
    else:
        sync.sync(2)
    engine.forgets = []
    sync.sync(3)
    engine.close()


@pytest.mark.parametrize(
    ("fault", "says", "phase"),
    [
        ("missing", "untouched 1", "load"),
        ("unknown", "unknown 1", "load"),
        ("shape", "failed after phases: wake_weights", "load"),
        ("raise", "the trainer broke", "load"),
        ("slow", "deadline passed", "load"),
    ],
)
def test_a_sync_that_is_not_whole_is_an_error_and_the_replica_does_not_serve(pair, fault, says, phase):
    model, engine, sync, phases = pair
    model.fault = fault
    with pytest.raises(SyncError, match=says) as caught:
        sync.sync(1)
    assert caught.value.fenced == ["0"]
    assert phases[-1][0] == phase and phases[-1][1]
    assert "wake_kv" not in [name for name, _ in phases]
    if fault != "unknown":
        with pytest.raises(RlctlError):
            generate(engine)
    model.fault = ""
    sync.sync(2)
    assert generate(engine).segments[0].version == 2
