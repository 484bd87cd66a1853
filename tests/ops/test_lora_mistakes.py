"""Mistakes with adapters end before the first step, in a dry run too, with one message that says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlctl.cli import main
from rlctl.keys.lora.config import AdapterConfig
from rlctl.model.adapter_faults import base_name_fault

MODULES = {"q_proj": (128, 128), "v_proj": (64, 128)}  # of the built-in model: (outputs, inputs)
RUN = {"model.lora.rank": "4", "model.lora.target_modules": "[q_proj,v_proj]"}


def adapter(
    folder: Path, *, rank: int = 4, width: int = 0, layers: int = 2, extra: dict | None = None, **config
) -> Path:
    """Write an adapter for the built-in model, or one that is off in what is given."""
    folder.mkdir()
    tensors = {}
    for layer in range(layers):
        for name, (outputs, inputs) in MODULES.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.ones(rank, width or inputs)
            tensors[f"{path}.lora_B.weight"] = torch.ones(outputs, rank)
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(MODULES), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


MAGNITUDES = {
    f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_magnitude_vector": torch.ones(outputs)
    for layer in (0, 1)
    for name, (outputs, _) in MODULES.items()
}


@pytest.mark.parametrize("dry", [["--dry-run"], ["--run-dir", "run"]], ids=["dry", "run"])
@pytest.mark.parametrize(
    ("words", "off", "says"),
    [
        (["model.lora.alpha=0"], None, "must be above 0"),
        (["model.lora.alpha=-8"], None, "must be above 0"),
        (["model.lora.rank=-1"], None, "the least is 0"),
        (["model.lora.rank=0"], None, "rank 0 trains all weights"),
        (["model.lora.rank=0", "model.lora.target_modules=[all-linear]", "model.lora.sync=adapter"], None, "lora.sync"),
        (["model.lora.target_modules=[]"], None, "no module would get an adapter"),
        (["model.lora.target_modules=[q_prj]"], None, "is it 'q_proj'?"),
        (["model.lora.target_modules=[lm_head]"], None, "ties the head"),
        (["model.lora.target_modules=[all-linear,q_proj]"], None, "takes no other name"),
        (["model.lora.rank=0", "model.lora.target_modules=[all-linear]", "model.lora.use_dora=true"], None, "use_dora"),
        (["model.lora.use_lora_plus=true"], None, "model.lora.use_lora_plus: unknown key"),
        ([], {"lora_alpha": 0}, "lora_alpha is 0"),
        ([], {"rank": 8}, "set model.lora.rank=8 model.lora.alpha=16"),
        ([], {"lora_alpha": 8}, "set model.lora.rank=4 model.lora.alpha=8"),
        ([], {"use_rslora": True}, "model.lora.alpha=16 model.lora.use_rslora=true"),
        ([], {"width": 96}, "made for this model"),
        ([], {"layers": 3}, "its modules are others"),
        (["model.lora.target_modules=[q_proj]"], {}, "set it to [q_proj,v_proj]"),
        ([], {"base_model_name_or_path": "org/other-7B"}, "it says that it was trained on org/other-7B"),
        ([], {"use_dora": True, "extra": MAGNITUDES}, "set model.lora.use_dora=true"),
        (["model.lora.use_dora=true"], {}, "set model.lora.use_dora=false"),
        (["model.lora.use_rslora=true"], {}, "model.lora.alpha=16 model.lora.use_rslora=false"),
        ([], {"init_lora_weights": "pissa"}, "not one that is trained: init_lora_weights='pissa'"),
    ],
)
def test_refused_before_anything_is_written(words, off, says, dry, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    given = [] if off is None else [f"model.lora.adapter={adapter(tmp_path / 'adapter', **off)}"]
    keys = RUN | dict(word.split("=", 1) for word in (*given, *words))
    code = main(["train", *dry, *(f"{key}={value}" for key, value in keys.items())])
    said = capfd.readouterr().err
    assert code == 2 and says in said, said
    assert "Traceback" not in said and not Path("run").exists()


def test_an_adapter_that_fits_passes_and_no_torch_is_loaded(tmp_path):
    words = ["train", "--dry-run", "--json", *(f"{key}={value}" for key, value in RUN.items())]
    code = """
import json, sys
from rlctl.cli import main
code = main(json.loads(sys.argv[1]))
assert "torch" not in sys.modules
sys.exit(code)
"""
    words.append(f"model.lora.adapter={adapter(tmp_path / 'adapter')}")
    command = [sys.executable, "-c", code, json.dumps(words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    checks = {check["rule"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert checks["targets_are_in_the_model"] == checks["adapter_fits_the_model"] == "ok"


@pytest.mark.parametrize(
    ("named", "model", "one"),
    [
        (None, "cycle-tiny", True),
        ("org/Name-1B", "/models/name-1b", True),
        ("org/Name-1B", "/hub/models--org--Name-1B/snapshots/1f00", True),
        ("/hub/models--org--Name-1B/snapshots/1f00", "org/Name-1B", True),
        ("org/Name-1B", "org/Name-7B", False),
        ("org/Name-1B", "org/Name-1B-Instruct", False),
        ("/models/a", "/models/b", False),
    ],
)
def test_names_of_one_model(named, model, one):
    fault = base_name_fault(AdapterConfig(base_model_name_or_path=named), model)
    assert (fault is None) == one


def test_experts_are_among_the_names_that_there_are(tmp_path, capfd):
    config = {
        "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 61,
        "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["train", "--dry-run", f"model.path={tmp_path}", "model.lora.rank=4"]
    for targets in ("all-linear", "q_proj,gate_up_proj", "experts.down_proj"):
        assert main([*words, f"model.lora.target_modules=[{targets}]"]) == 0
    assert main([*words, "model.lora.target_modules=[q_proj,experts.down_proj]", "model.lora.use_dora=true"]) == 2
    assert "DoRA cannot be trained on stacked experts" in capfd.readouterr().err
    assert main([*words, "model.lora.target_modules=[gate_up_prj]"]) == 2
    assert "is it 'gate_up_proj'?" in capfd.readouterr().err
