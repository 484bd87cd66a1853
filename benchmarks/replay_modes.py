"""Whether recorded runs of every mode come out as they were, level by level.

    python benchmarks/replay_modes.py [--steps 30] [--only NAME ...] [--json FILE] [key=value ...]

Each case is trained with its batches recorded and replayed at all levels in a fresh process, with and without
run.deterministic. R0, R1, R2 and R4 must be exact on every step; R3 with run.deterministic and the transformers
engine. Exits 4 when one is not. A case whose package is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlctl.errors import EXIT_CHECK

SMALL = (
    "run.record=batches", "run.record_window=0", "run.checkpoint_every=5", "run.validate_prompts=0", "run.threads=1",
    "trainer.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=32",
    "trainer.optimizer.lr=1e-4",
)  # fmt: skip
TWO = ("trainer.mini_batch_prompts=2",)
BESIDE = ("--profile", "cpu-separate")
CASES: dict[str, tuple[str, ...]] = {
    "sync": TWO,
    "colocate_async": ("trainer.mode=colocate_async", *TWO),
    "separate_async": (*BESIDE, "trainer.parameter_sync_step=2", *TWO),
    "one_step_off": (*BESIDE, "trainer.mode=one_step_off", "trainer.mini_batch_prompts=4"),
    "sync-2-ranks": ("cluster.devices_per_node=2", "placement.trainer_ranks=2", *TWO),
    "separate_async-2-ranks": (
        *BESIDE, "cluster.devices_per_node=4", "placement.trainer_ranks=2", "placement.replicas=2",
        "trainer.parameter_sync_step=2", *TWO,
    ),
    "sync-vllm": ("--profile", "cpu-vllm", *TWO),
}  # fmt: skip
UNTOLD = ("sync-vllm",)
"""An engine that decodes by itself is none for run.deterministic."""
NEEDS = {"sync-vllm": "vllm"}
LEVELS = ("R0", "R1", "R2", "R3", "R4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder to leave the runs in")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        for name in arguments.only:
            if name in NEEDS and find_spec(NEEDS[name]) is None:
                print(f"{name}: {NEEDS[name]} is not installed", file=sys.stderr)
                continue
            for deterministic in ("true", "false") if name not in UNTOLD else ("false",):
                key = f"{name}{'' if deterministic == 'true' else ', not deterministic'}"
                words = [*CASES[name], f"run.deterministic={deterministic}", *arguments.overrides]
                found[key] = one(root / f"{name}-{deterministic}", arguments.steps, words)
                print(f"{key}: {json.dumps(found[key])}", file=sys.stderr, flush=True)
    held = all(case["holds"] for case in found.values())
    document = {"steps": arguments.steps, "cases": found, "holds": held, "load": os.getloadavg()}
    print(json.dumps(document, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if held else EXIT_CHECK


def one(folder: Path, steps: int, words: list[str]) -> dict[str, Any]:
    """Train a run, replay it, and return how many steps had which status at each level."""
    begin = time.perf_counter()
    rlctl("train", "--run-dir", str(folder), *SMALL, f"run.steps={steps}", *words, codes=(0,))
    trained = time.perf_counter()
    levels = ("--level", "all", "--json")
    results = json.loads(rlctl("replay", str(folder), *levels, codes=(0, EXIT_CHECK)))["results"]
    table = {
        level: dict(Counter(result["status"] for result in results if result["level"] == level)) for level in LEVELS
    }
    exact = "run.deterministic=true" in words
    must = [level for level in LEVELS if level != "R3" or exact]
    return {
        "holds": all(table[level] == {"exact": steps} for level in must),
        "levels": table,
        "reasons": sorted({result["reason"] for result in results if result["reason"]})[:5],
        "train_seconds": round(trained - begin, 1),
        "replay_seconds": round(time.perf_counter() - trained, 1),
    }


def rlctl(*words: str, codes: tuple[int, ...]) -> str:
    """Run the command line and return what it printed; any other exit code ends this program with its errors."""
    process = subprocess.run([sys.executable, "-m", "rlctl", *words], capture_output=True, text=True, check=False)
    if process.returncode not in codes:
        sys.exit(f"rlctl {' '.join(words)}: exit {process.returncode}\n{process.stderr[-3000:]}")
    return process.stdout


if __name__ == "__main__":
    sys.exit(main())
