"""Predicted memory of a run against that of the same run, phase by phase.

    python benchmarks/memory_profile.py            # a model of 208 MiB under cpu-quickstart, with shorter sequences
    python benchmarks/memory_profile.py --full     # the profile's own lengths: minutes

Prints a table and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from rlctl.ops.memory_measure import measure_memory
from rlctl.ops.resolve import resolve

CONFIG = {
    "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 8000, "tie_word_embeddings": True,
    "max_position_embeddings": 4096, "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
SHORT = (
    "task.max_prompt_tokens=64",
    "rollout.max_new_tokens=64",
    "rollout.max_slots=16",
    "trainer.micro_batch_tokens=1024",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the profile's own lengths")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(CONFIG))
        overrides = [f"model.dtype={arguments.dtype}", *(() if arguments.full else SHORT)]
        begin = time.perf_counter()
        found = measure_memory(
            resolve("cpu-quickstart", flags={"--model": str(file)}, overrides=overrides), timeout=3600
        )
    print(f"{arguments.dtype}, {time.perf_counter() - begin:.0f} s, imports {found.measured.imports >> 20} MiB")
    worst = 0.0
    for phase in found.profile.estimate.phases:
        taken = found.measured.peaks[phase.name]
        worst = max(worst, abs(phase.nbytes / taken - 1))
        print(f"{phase.name:24} predicted {phase.nbytes / 2**20:8.1f} MiB  measured {taken / 2**20:8.1f} MiB  "
              f"{phase.nbytes / taken - 1:+.1%}")  # fmt: skip
    print(f"largest difference {worst:.1%}")


if __name__ == "__main__":
    main()
