"""What ``ipc`` makes of a memory copy: both ways, interleaved with the copy, by wall clock and by CPU seconds.

    PYTHONPATH=. python benchmarks/ipc.py --repeat 9

Whole syncs by the sync manager, trainer and rollout worker in processes of their own. Wall times jump on a busy
machine; the load is printed before and after.
"""

from __future__ import annotations

import argparse
import os

from rlctl.ops.sync_bench import plan_bench, run_bench
from rlctl.ops.sync_bench_options import BenchOptions
from rlctl.ops.sync_bench_workload import model_tensors

# Variant -> shares of the copy's speed that it must reach: by wall clock, by CPU seconds (None: not asked).
BARS: dict[str, tuple[float, float | None]] = {"mapped": (0.90, None), "ring": (0.40, 0.45)}


def main() -> None:
    """Print the ratios, and whether they reach the bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--verify", choices=["off", "sampled", "full"], default="off")
    args = parser.parse_args()
    options = BenchOptions(["ipc"], model_tensors(args.model), iters=args.repeat, verify=args.verify)
    print(f"{args.model}, verify {args.verify}, median of {args.repeat}; {load()}")
    result = run_bench(options, plan_bench(options))
    limit = result.limit
    print(f"copy    wall {limit.time_s.p50:.4f} s         cpu {limit.cpu_s:.4f} s")
    for row in result.rows:
        wall, cpu = BARS[row.variant]
        reached = row.limit_ratio.wall >= wall and (cpu is None or row.limit_ratio.cpu >= cpu)
        print(
            f"{row.variant:7} wall {row.time_s.p50:.4f} s {row.limit_ratio.wall:5.0%}   "
            f"cpu {row.cpu_s:.4f} s {row.limit_ratio.cpu:5.0%}   wrong {row.wrong}   "
            f"{'reached' if reached else 'NOT REACHED'}: wall {wall:.0%}{'' if cpu is None else f', cpu {cpu:.0%}'}"
        )
    print(f"verify full: {limit.verify_cpu_s_per_gib:.4f} CPU s for each GiB on each side (bar 0.05); {load()}")


def load() -> str:
    """Return the load of the machine in words."""
    return f"load {' '.join(f'{x:.2f}' for x in os.getloadavg())} on {os.cpu_count()} CPUs"


if __name__ == "__main__":
    main()
