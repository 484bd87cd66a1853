"""What recording costs, and whether a long run stays within its window on disk.

    python benchmarks/record.py [--pairs 7] [--steps 20] [--json FILE] [key=value ...]
    python benchmarks/record.py --long 1000 [key=value ...]

Three processes train equal runs: one that records nothing, one its events, one its batches too. They train in turns,
one step each, in an order that rotates from step to step, and each process trains each kind once in a set, so that
neither what else the machine does nor how a process happens to lie in memory is counted as recording. CPU seconds of
a step are those between the ends of two steps: of all threads, the writing one included, and of child processes.
Steps that warm up are left out. Those that are measured are one way between two checkpoints: with a checkpoint, with
what recording makes safe on disk before it, and with as many old records removed as new ones written. ``itself`` is
what the recorder's own thread and calls took by their clocks: without the machine's noise, and without what recording
does to other threads. Exits 1 when the median set's batches cost as much as the bound over recording nothing, or a
long run leaves its window.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlctl.config import to_json
from rlctl.experience.events import Event, StepEnded
from rlctl.experience.records.manifest import recorded_steps
from rlctl.experience.records.window import Window
from rlctl.ops.resuming import resolve_run
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training
from rlctl.trainers.recording import Recorder

BOUND = 0.03
ARMS = ("off", "events", "batches")
COMMON = {"run.validate_prompts": "0", "run.threads": "1"}
# The checkpoint of step 10 stands behind the steps that warm up; with step 14 ten records have left the window.
EVERY = WARM = 10
CLOSE = {"run.record_window": "4", "run.checkpoint_every": str(EVERY)}
# Otherwise glibc gives memory back and takes it again more or less often by chance: up to 4000 page faults a step.
STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
TINY = {
    "trainer.prompts_per_step": "2", "rollout.samples_per_prompt": "2", "rollout.max_new_tokens": "8",
    "run.checkpoint_every": "10", "run.record_window": "32", "run.record": "batches", "trainer.optimizer.lr": "1e-5",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=EVERY, help="measured in each run")
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
    return 0 if found["holds"] else 1


def costs(pairs: int, steps: int, given: dict[str, str]) -> dict[str, Any]:
    """Return what recording adds to the CPU seconds of a step."""
    os.environ.update(STEADY)
    sets, itself, context, lines, processes = [], [], get_context("spawn"), [], []
    for _ in ARMS:
        mine, theirs = context.Pipe()
        lines.append(mine)
        processes.append(context.Process(target=train_by_turns, args=(theirs,), daemon=True))
        processes[-1].start()
        theirs.close()
    train_in_turns(lines, ARMS, 2, given, warm=1)  # imports, and the first compilations
    for number in range(1, pairs + 1):
        spent, own = dict.fromkeys(ARMS, 0.0), 0.0
        for turn in range(len(ARMS)):
            for arm, (seconds, recording) in train_in_turns(lines, _rotated(ARMS, turn), steps, given).items():
                spent[arm] += seconds / len(ARMS)
                own += recording / len(ARMS)
        sets.append(spent)
        itself.append(own)
        more = ", ".join(f"{arm} {100 * (spent[arm] / spent['off'] - 1):+.2f} %" for arm in ARMS[1:])
        print(
            f"set {number}: {1000 * spent['off']:.1f} CPU ms a step; {more}; itself {1000 * own:.2f} ms",
            file=sys.stderr,
        )
    for line, process in zip(lines, processes, strict=True):
        line.send_bytes(b"")
        process.join()
    added = {
        f"{arm} over {base}": _spread([one[arm] / one[base] - 1 for one in sets])
        for arm, base in (("batches", "off"), ("batches", "events"), ("events", "off"))
    }
    plain = statistics.median(one["off"] for one in sets)
    added["itself over off"] = _spread([own / one["off"] for own, one in zip(itself, sets, strict=True)])
    return {"step_cpu_seconds": plain, "added": added, "holds": added["batches over off"]["median"] < BOUND}


def _spread(ratios: list[float]) -> dict[str, Any]:
    """Return the median and what it lies between: of seven, the second and the sixth hold it seven times in eight."""
    ordered = sorted(ratios)
    inner = ordered[1:-1] if len(ordered) > 4 else ordered
    return {"median": statistics.median(ordered), "low": inner[0], "high": inner[-1], "each": ratios}


def train_in_turns(
    lines: Sequence[Connection], arms: Sequence[str], steps: int, given: dict[str, str], *, warm: int = WARM
) -> dict[str, tuple[float, float]]:
    """Have each process train a run, step by step in turns, and return the CPU seconds of a step of each kind: all, and
    what recording took of them."""
    settings = {**COMMON, **CLOSE, **given, "run.steps": str(warm + steps)}
    for line, arm in zip(lines, arms, strict=True):
        line.send_bytes(json.dumps({**settings, "run.record": arm}).encode())
    spent = [[_told(line)] for line in lines]
    for step in range(warm + steps - 1):
        for index in _rotated(range(len(lines)), step):
            lines[index].send_bytes(b"go")
            spent[index].append(_told(lines[index]))
    for line in lines:
        line.send_bytes(b"go")
    digests = {line.recv_bytes() for line in lines}
    assert len(digests) == 1, "the runs did not train the same"
    return {
        arm: ((times[-1][0] - times[warm - 1][0]) / steps, (times[-1][1] - times[warm - 1][1]) / steps)
        for arm, times in zip(arms, spent, strict=True)
    }


def _told(line: Connection) -> tuple[float, float]:
    seconds, recording = json.loads(line.recv_bytes())
    return seconds, recording


def train_by_turns(line: Connection) -> None:
    """Train what is asked for; at the end of each step, tell the CPU seconds until then and wait for the next turn."""

    recording = timed_recorder()

    def heard(event: Event) -> None:
        if isinstance(event, StepEnded):
            line.send_bytes(json.dumps([cpu_seconds(), recording()]).encode())
            line.recv_bytes()

    while asked := line.recv_bytes():
        with tempfile.TemporaryDirectory() as folder:
            result = _train(Path(folder) / "run", json.loads(asked), heard)
        line.send_bytes(result["params_digest"].encode())


def timed_recorder() -> Callable[[], float]:
    """Have the recorder's calls timed; return what tells the CPU seconds of these and of its thread in a run so far."""
    spent = [0.0]

    def timed(act: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            begin = time.thread_time()
            act(*args)
            spent[0] += time.thread_time() - begin

        return call

    for name in ("begin_round", "end_round", "end_step", "flush"):
        setattr(Recorder, name, timed(getattr(Recorder, name)))

    def told() -> float:
        clocks = (
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name == "rlctl-records" and thread.ident is not None
        )
        return spent[0] + sum(clocks)

    return told


def _train(folder: Path, settings: dict[str, str], heard: Callable[[Event], None]) -> dict[str, Any]:
    path = RunPath(folder, resume=False)
    resolution = resolve_run(path, overrides=[f"{key}={value}" for key, value in settings.items()])
    resolution.require_valid()
    return run_training(resolution.config, path, document=to_json(resolution.resolved), listeners=[heard])


def _rotated(whole: Sequence[Any], by: int) -> list[Any]:
    return [whole[(index + by) % len(whole)] for index in range(len(whole))]


def cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process, and of its child processes."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # A process's CPU clock as clock_getcpuclockid(3) numbers it.
    running = sum(time.clock_gettime((~pid << 3) | 2) for pid in _below(os.getpid()))
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def _below(pid: int) -> list[int]:
    children = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [found for child in children for found in (child, *_below(child))]


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
        begin = cpu_seconds()
        _train(folder / "run", settings, heard)
        seconds = cpu_seconds() - begin
        run = json.loads((folder / "run" / "config.json").read_text())["config"]["run"]
        window = Window(run["record_window"], run["checkpoint_every"])
        # Beside the window: what pins hold, at most one way from a checkpoint each.
        bound = window.most + run["record_pins"] * (run["checkpoint_every"] + window.steps // 2)
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
