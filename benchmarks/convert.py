"""What a conversion costs. Sub-benchmarks, each printed as one JSON document:

    python -m benchmarks.convert rename [--gib 4] [--repeats 5] [--folder DIR]
    python -m benchmarks.convert rss [--folder DIR]
    python -m benchmarks.convert lora-merge [--folder DIR]

``rename`` times renaming every tensor of a sharded checkpoint against ``cp -r`` of the same folder; ``rss`` measures
the memory that conversions which change data take beyond what the process holds anyway; ``lora-merge`` times load,
merge and save against PEFT. Imports are not counted, sides take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import convert_rename, convert_rss, lora_merge


def main() -> int:
    """Run the named sub-benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["rename", "rss", "lora-merge"])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to put the files: on the disk to be measured")
    options = parser.parse_args()
    runs: dict[str, Callable[[Path], dict[str, Any]]] = {
        "rename": lambda work: convert_rename.run(work, gib=options.gib, repeats=options.repeats),
        "rss": convert_rss.run,
        "lora-merge": lambda work: lora_merge.run(work, repeats=options.repeats),
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        print(json.dumps(runs[options.which](Path(work)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
