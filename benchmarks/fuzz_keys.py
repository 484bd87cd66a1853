"""Put thousands of damaged and forged checkpoints through the readers of ``rlctl.keys``, and count how each ended.

    python -m benchmarks.fuzz_keys [--count 10000] [--first 0]

Every input is made from its seed alone, so that a failure is repeated with ``--first SEED --count 1``. The address
space is limited, so that an input which asks for absurd memory fails here instead of passing unnoticed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.keys.hostile_run import survives

MEMORY = 12 << 30


def main() -> int:
    """Run, print the outcome counts, and return 1 when any input broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.count):
            try:
                outcomes[survives(seed, Path(folder))] += 1
            except AssertionError as error:
                failures.append(str(error))
                print(error, flush=True)
    print(f"{options.count} inputs, {time.process_time() - start:.0f} CPU s, {len(failures)} failures")
    for outcome, count in outcomes.most_common():
        print(f"  {count:6d} {outcome}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
