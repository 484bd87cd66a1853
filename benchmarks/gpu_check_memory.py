"""Predicted memory of a run on one GPU against what its allocator and its driver report, phase by phase.

    PYTHONPATH=. python benchmarks/gpu_check_memory.py [--out result.json]

One GPU and four minutes do. Prints one JSON document with the device and the versions. Exit 0 when every phase is
within 5 %, 4 when one is not, 3 without a GPU. The embedded rollout engine runs in the trainer's process, so what is
compared is the allocator's peak above its first use; context and fragmentation, which are assumed and not computed, are
left out of the comparison and given beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from rlctl.errors import EXIT_CHECK, EXIT_UNAVAILABLE
from rlctl.ops.memory_measure import measure_memory
from rlctl.ops.resolve import resolve

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 32000,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
OVERRIDES = (
    "cluster.device=cuda",
    "task.max_prompt_tokens=256",
    "rollout.max_new_tokens=256",
    "rollout.max_slots=64",
    "trainer.micro_batch_tokens=8192",
)
BOUND = 0.05
ASSUMED = ("context", "fragmentation")
SECONDS = 200.0


def compared(dtype: str) -> list[dict[str, Any]]:
    """Return a row for each phase of a run in ``dtype``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(CONFIG))
        overrides = [*OVERRIDES, f"model.dtype={dtype}"]
        found = measure_memory(
            resolve("cpu-quickstart", flags={"--model": str(file)}, overrides=overrides), timeout=SECONDS / 2
        )
    rows = []
    for phase in found.profile.estimate.phases:
        counted = sum(n for part, n in phase.parts.items() if part not in ASSUMED)
        taken = found.measured.peaks[phase.name]
        rows.append({
            "dtype": dtype, "phase": phase.name, "predicted_bytes": counted, "measured_bytes": taken,
            "off": counted / taken - 1 if taken else None, **found.measured.extras.get(phase.name, {}),
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the document there, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU is visible here", file=sys.stderr)
        return EXIT_UNAVAILABLE
    rows = [row for dtype in ("float32", "bfloat16") for row in compared(dtype)]
    # An empty device (after sleep) has no share to be off by.
    held = all(abs(row["off"]) <= BOUND for row in rows if row["off"] is not None and row["measured_bytes"] > 64 << 20)
    document = json.dumps({
        "device": torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "bound": BOUND, "held": held, "phases": rows,
    }, indent=1)  # fmt: skip
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n")
    return 0 if held else EXIT_CHECK


if __name__ == "__main__":
    sys.exit(main())
