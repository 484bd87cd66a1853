"""What recording costs, and whether a long run stays within its window on disk.

    python benchmarks/record.py [--pairs 7] [--steps 12] [--json FILE] [key=value ...]
    python benchmarks/record.py --long 1000 [key=value ...]

Pairs of equal runs in this process, one that records its events and one that records its batches too, in turns, with
the order swapped from pair to pair. CPU seconds of a step are those between the ends of two steps: of all threads, the
writing one included. The first steps, which warm up, are left out. Exits 4 when the median pair costs more than the
bound, or a long run leaves its window.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlctl.config import to_json
from rlctl.errors import EXIT_CHECK
from rlctl.experience.events import Event, StepEnded
from rlctl.experience.records.manifest import recorded_steps
from rlctl.experience.records.window import Window
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training

BOUND = 0.03
WARM = 2
COMMON = {"run.validate_prompts": "0", "run.threads": "1", "run.checkpoint_every": "0"}
TINY = {
    "trainer.prompts_per_step": "2", "rollout.samples_per_prompt": "2", "rollout.max_new_tokens": "8",
    "run.checkpoint_every": "10", "run.record_window": "32", "run.record": "batches", "trainer.optimizer.lr": "1e-5",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--long", type=int, default=0, help="train so many tiny steps and look at the disk instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    given = dict(word.split("=", 1) for word in arguments.overrides)
    found = long_run(arguments.long, given) if arguments.long else costs(arguments.pairs, arguments.steps, given)
    found["load"] = os.getloadavg()
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["holds"] else EXIT_CHECK


def costs(pairs: int, steps: int, given: dict[str, str]) -> dict[str, Any]:
    """Return what recording batches adds to the CPU seconds of a step."""
    ratios, plain = [], []
    run_once(
        {**COMMON, **given, "run.steps": str(WARM), "run.record": "batches"}
    )  # imports, and the first compilations
    for pair in range(pairs):
        seconds = {}
        for record in ("events", "batches") if pair % 2 else ("batches", "events"):
            seconds[record] = run_once({**COMMON, **given, "run.steps": str(WARM + steps), "run.record": record})
        ratios.append(seconds["batches"] / seconds["events"] - 1)
        plain.append(seconds["events"] / steps)
        print(f"pair {pair + 1}: {plain[-1]:.3f} CPU s a step, recording {100 * ratios[-1]:+.2f} %", file=sys.stderr)
    median = statistics.median(ratios)
    return {"step_cpu_seconds": statistics.median(plain), "added": ratios, "median": median, "holds": median < BOUND}


def run_once(settings: dict[str, str]) -> float:
    """Train, and return the CPU seconds of all steps behind the warm ones."""
    ends: list[float] = []

    def heard(event: Event) -> None:
        if isinstance(event, StepEnded):
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        path = RunPath(Path(folder) / "run", resume=False)
        resolution = resolve_run(path, overrides=[f"{key}={value}" for key, value in settings.items()])
        resolution.require_valid()
        run_training(resolution.config, path, document=to_json(resolution.resolved), listeners=[heard])
    return ends[-1] - ends[WARM - 1]


def long_run(steps: int, given: dict[str, str]) -> dict[str, Any]:
    """Return how much a recorded run held on disk, looked at after every step."""
    settings = {**COMMON, **TINY, **given, "run.steps": str(steps)}
    most = {"records": 0, "record_bytes": 0, "checkpoints": 0}
    folder = Path(tempfile.mkdtemp())

    def heard(event: Event) -> None:
        if not isinstance(event, StepEnded) or event.step % 5:
            return
        records = folder / "run" / "records"
        most["records"] = max(most["records"], len(recorded_steps(records)))
        most["record_bytes"] = max(most["record_bytes"], _size(records))
        most["checkpoints"] = max(most["checkpoints"], len(list((folder / "run" / "ckpt").glob("step_*"))))

    try:
        path = RunPath(folder / "run", resume=False)
        resolution = resolve_run(path, overrides=[f"{key}={value}" for key, value in settings.items()])
        resolution.require_valid()
        run = resolution.config.run
        begin = time.process_time()
        run_training(resolution.config, path, document=to_json(resolution.resolved), listeners=[heard])
        seconds = time.process_time() - begin
        window = Window(run.record_window, run.checkpoint_every)
        # Beside the window: what pins hold, at most one way from a checkpoint each.
        bound = window.most + run.record_pins * (run.checkpoint_every + window.steps // 2)
        events = (folder / "run" / "events.jsonl").stat().st_size
        return {
            "steps": steps,
            "cpu_seconds": seconds,
            **most,
            "most_in_window": window.most,
            "most_with_pins": bound,
            "pinned": len(json.loads((folder / "run" / "records" / "pinned.json").read_text())),
            "event_bytes": events,
            "holds": most["records"] <= bound,
        }
    finally:
        shutil.rmtree(folder)


def _size(folder: Path) -> int:
    found = 0
    for place, _, names in os.walk(folder):  # which passes over what goes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += (Path(place) / name).stat().st_size
    return found


if __name__ == "__main__":
    sys.exit(main())
