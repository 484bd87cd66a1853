"""The memory that conversions which change data take: peak resident size beyond the process's own, per conversion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.synthetic_model import config_of, write_model

LIMIT = 64 << 20  # beyond the largest tensor
CASES: dict[str, dict[str, Any]] = {
    "qkv and gate/up fused, tp 2": {"model": {}, "to": "megatron", "tp": 2},
    "cast to float32": {"model": {}, "to": "hf", "dtype": "F32"},
    "experts stacked": {
        "model": {
            "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 16, "moe_intermediate_size": 1024,
            "num_experts_per_tok": 2,
        },
        "to": "hf-fused",
    },
}  # fmt: skip

# Run in a fresh process. The small conversion first loads every module and lets the allocators take their share once.
# getrusage is no help: its peak is inherited from the process that started this one.
PROGRAM = """
import json, sys
from pathlib import Path
from rlctl.keys.convert import Conversion, prepare
from rlctl.keys.safetensors_header import tensor_nbytes
small, source, out, to, options = sys.argv[1:]
def convert(source, out):
    prepared = prepare(Conversion(Path(source), to, **json.loads(options)))
    prepared.write(Path(out), durable=False)
    return max(tensor_nbytes(move.dtype, move.shape) for move in prepared.plan.moves)
def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
convert(small, out + "-small")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size: proc(5)
before = resident("VmRSS")
largest = convert(source, out)
print(json.dumps([before, resident("VmHWM"), largest]))
"""


def run(work: Path) -> dict[str, Any]:
    """Convert a 1 GiB model in each way; return for each the peak beyond the start, and whether it kept the limit."""
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        options = dict(case)
        model, to = options.pop("model"), options.pop("to")
        source, small = work / f"{number}", work / f"{number}-small"
        size = write_model(source, config_of(1, **model), max_shard_bytes=300 << 20)
        tiny = {**model, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "head_dim": 4}
        tiny |= {"moe_intermediate_size": 8} if "moe_intermediate_size" in model else {}
        write_model(small, config_of(0, **tiny))
        arguments = [str(small), str(source), str(work / f"{number}-out"), to, json.dumps(options)]
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        before, peak, largest = json.loads(done.stdout)
        results[name] = {
            "bytes": size,
            "largest_target": largest,
            "peak_beyond_start": peak - before,
            "within_limit": peak - before <= largest + LIMIT,
        }
    return results
