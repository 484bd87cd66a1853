"""`rlctl train` as a newcomer runs it: three seeds, wall and CPU seconds, reward and held-out accuracy.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--json]

Bound: each run ends within 90 s on 2 cores and has a mean reward of at least 0.9 over its last 20 steps, from at most
0.3 at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(seed: int, folder: Path) -> dict[str, float]:
    """Return what one run cost and gave."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "rlctl", "train", "--json", "--seed", str(seed), "--run-dir", str(folder)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)
    return {
        "seed": seed,
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "steps": result["steps"],
        "reward_first": result["reward"]["first"],
        "reward_last": result["reward"]["last"],
        "eval_before": result["eval"]["before"],
        "eval_after": result["eval"]["after"],
        "samples_per_s": result["samples_per_s"],
    }


def main() -> int:
    """Run all seeds; exit 1 when one misses the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run(seed, Path(scratch, str(seed))) for seed in options.seeds]
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))
    else:
        print("  ".join(f"{name:>13}" for name in rows[0]))
        for row in rows:
            print(
                "  ".join(f"{value:>13.3f}" if isinstance(value, float) else f"{value:>13}" for value in row.values())
            )
    met = all(r["wall_s"] <= 90 and r["reward_last"] >= 0.9 and r["reward_first"] <= 0.3 for r in rows)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
