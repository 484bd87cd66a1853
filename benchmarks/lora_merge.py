"""Load a LoRA and its base, merge, save: ``convert-keys --merge`` against PEFT's merge_and_unload + save_pretrained."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(work: Path, *, repeats: int = 5) -> dict[str, Any]:
    """Time both on a 1 GiB bf16 model with r=16 on every linear layer, turn by turn; imports are not counted.

    Returns medians of wall and CPU seconds, their ratios, and the largest difference from the float32 merge cast once.
    """
    base, adapter = work / "base", work / "adapter"
    _make(base, adapter)
    sides: dict[str, Callable[[Path], None]] = {"peft": _peft(base, adapter), "rlctl": _rlctl(base, adapter)}
    for name, side in sides.items():  # one warm round: lazy imports, page cache
        side(work / f"out-{name}")
    ulps = _ulps(base, adapter, work / "out-rlctl")
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            out = work / f"out-{name}"
            shutil.rmtree(out)
            gc.collect()
            start_wall, start_cpu = time.perf_counter(), time.process_time()
            side(out)
            cpu[name].append(time.process_time() - start_cpu)
            wall[name].append(time.perf_counter() - start_wall)
    median = {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in sides}
    return {
        "threads": _threads(),
        "repeats": repeats,
        "bytes": sum(f.stat().st_size for f in base.glob("*.safetensors")),
        "wall_s": {name: round(m[0], 3) for name, m in median.items()},
        "cpu_s": {name: round(m[1], 3) for name, m in median.items()},
        "times_faster": {
            "wall": round(median["peft"][0] / median["rlctl"][0], 2),
            "cpu": round(median["peft"][1] / median["rlctl"][1], 2),
        },
        "max_ulps_from_float32_merge": ulps,
    }


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _make(base: Path, adapter: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1536, intermediate_size=6144, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(base, max_shard_size="300MB")
    tuned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    tuned.save_pretrained(adapter)


def _peft(base: Path, adapter: Path) -> Callable[[Path], None]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def merge(out: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="300MB")

    return merge


def _rlctl(base: Path, adapter: Path) -> Callable[[Path], None]:
    from rlctl.keys.convert import Conversion, prepare

    def merge(out: Path) -> None:
        # save_pretrained does not wait for the disk either
        prepare(Conversion(base, "hf", adapter=adapter, merge=True)).write(out, durable=False)

    return merge


def _ulps(base: Path, adapter: Path, merged: Path) -> int:
    """Return the largest distance, in bf16 steps, of the merged weights from the float32 merge cast once."""
    import torch

    from rlctl.keys.checkpoint import Checkpoint
    from rlctl.keys.lora.adapter import Adapter

    worst = 0
    with Checkpoint.open(base) as source, Checkpoint.open(merged) as result, Adapter.open(adapter) as opened:
        for module in opened.contents.modules:
            name = f"{module.path}.weight"
            exact = (source.tensor(name).float() + opened.delta(module)).to(torch.bfloat16)
            steps = [_ordered(t) for t in (exact, result.tensor(name))]
            worst = max(worst, int((steps[0] - steps[1]).abs().max()))
    return worst


def _ordered(tensor: Any) -> Any:
    """Return bf16 values as integers that count their steps: neighbouring values differ by one."""
    import torch

    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
