"""How fast the trainer modes are beside each other: interleaved runs of `rlctl train` on the built-in task.

    python -m benchmarks.modes [--part plain|fixed] [--pairs 7] [--steps 60] [--learn 3] [--json]

Part ``plain`` is two cores as they are; part ``fixed`` has an engine whose decode step costs 3 ms whatever the rows
(``fixed_decode.py``), as on a GPU at small batch. Every pair runs each set-up once, in turn and in another order, with
one seed, all from one policy that has learnt to think (its responses have a long tail: median 16 tokens, longest 160)
and at a rate at which it stays as it is. A set-up's speed is counted over a window in the middle of its run: groups of
8 responses a second, of those trained and those made the fewer, so that no stock made before or used up afterwards
counts. Ratios are to the best synchronous set-up, by the geometric mean over pairs with a 95 % interval (bootstrap over
pairs).

What the set-ups learn is another question, and has runs of its own: ``--learn`` seeds from the built-in model, as many
steps for each.

Of every token that was trained the lag (versions between making and training) is counted from the events and must be
within the mode's bound; where generation goes on through updates, some response must have tokens of two versions.

Bound, part ``fixed``, lower end of the interval, of a mode's best set-up: separate_async 1.4 (aim: 1.8), colocate_async
1.15. Of part ``plain`` nothing is claimed: two busy cores have nothing left to win. ``2 + 2`` is two trainer ranks and
two replicas in processes of their own that share two devices.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fixed_decode import NAME, install
from benchmarks.run_events import groups_per_second, lag_of_tokens, mixed_responses
from rlctl.experience.event_log import lineage, read_events

PROMPTS, SAMPLES = 16, 8
RUN_SECONDS = 900.0
BOUNDS = {"separate_async": 1.4, "colocate_async": 1.15}


@dataclass(frozen=True)
class Setup:
    """One way to run.

    Attributes:
        mode: of the trainer.
        profile: and further ``words`` of the configuration.
        lag: the most versions between making and training a token.
        threads: of the trainer.
        in_flight: responses are meant to go on through updates.
        updates: local updates between two syncs, of as many prompts each as in every other set-up.
    """

    mode: str
    profile: str
    words: tuple[str, ...] = ()
    lag: int = 0
    threads: int = 2
    in_flight: bool = False
    updates: int = 1


TWO = (
    "cluster.devices_per_node=2",
    "placement.trainer_ranks=2",
    "placement.replicas=2",
    "model.engine=fsdp2",
    "sync.backend=ipc",
)
AHEAD = ("trainer.parameter_sync_step=1", "trainer.warmup_batches=2", "trainer.max_staleness=2")
AHEAD_BY_ONE = ("trainer.parameter_sync_step=2", "trainer.warmup_batches=1", "trainer.max_staleness=1")
SETUPS = {
    "sync": Setup("sync", "cpu-quickstart"),
    "sync, 2 + 2": Setup("sync", "cpu-quickstart", TWO, threads=1),
    "colocate_async": Setup("colocate_async", "cpu-quickstart", ("trainer.max_staleness=2",), lag=2),
    "colocate_async, 2 + 2": Setup(
        "colocate_async", "cpu-quickstart", (*TWO, "trainer.max_staleness=2"), lag=2, threads=1
    ),
    "one_step_off": Setup("one_step_off", "cpu-separate", lag=1, threads=1),
    "separate_async": Setup("separate_async", "cpu-separate", AHEAD, lag=2, threads=1, in_flight=True),
    "separate_async, p = 2": Setup(
        "separate_async", "cpu-separate", AHEAD_BY_ONE, lag=1, threads=1, in_flight=True, updates=2
    ),
}
QUICK = ("sync", "colocate_async", "separate_async")
# So that a whole batch is decoded at once, which is best where a step costs the same whatever the rows.
FIXED = (f"rollout.engine={NAME}", "rollout.max_slots=128")
LEARNING = ("trainer.optimizer.lr=2e-4",)
STEADY = ("trainer.optimizer.lr=1e-6",)

Words = tuple[str, ...]
Runs = dict[str, list[dict[str, Any]]]


def train(setup: Setup, more: Words, steps: int, seed: int, folder: Path, path: list[str]) -> dict[str, Any]:
    """Run one set-up, ``steps`` updates long, and return its figures."""
    prompts = PROMPTS * setup.updates
    words = [
        *("train", "--json", "--profile", setup.profile, "--mode", setup.mode, "--run-dir", str(folder)),
        *(f"run.seed={seed}", f"run.steps={steps // setup.updates}", f"run.threads={setup.threads}", "--task", "cycle"),
        *(f"trainer.prompts_per_step={prompts}", f"rollout.samples_per_prompt={SAMPLES}"),
        *("run.validate_prompts=0", "run.checkpoint_every=0", *setup.words, *more),
    ]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "rlctl", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=RUN_SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout)
    events = list(lineage(read_events(folder / "events.jsonl").events))
    lags = lag_of_tokens(events)
    assert max(lags) <= setup.lag, f"{setup.mode}: a token of lag {max(lags)} was trained, bound {setup.lag}"
    mixed = mixed_responses(events)
    assert mixed or not setup.in_flight or steps < 20, "no response has tokens of two versions"
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "groups_per_s": groups_per_second(events, prompts),
        "final": result["final"],
        "reward_last": result["reward"]["last"],
        "utilisation": cpu / (wall * (os.cpu_count() or 1)),
        "bubble_trainer": result["bubble"]["trainer"],
        "bubble_rollout": result["bubble"]["rollout"],
        "sync_seconds": result["sync"]["seconds"] / max(1, result["sync"]["count"]),
        "lag_mean": sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
        "lag_max": max(lags),
        "mixed_responses": mixed,
        "wall_s": wall,
    }


def interval(ratios: list[float], seed: int = 0) -> dict[str, float]:
    """Return the geometric mean of ratios and its 95 % interval, by resampling them 10,000 times."""
    logs, draw = [math.log(ratio) for ratio in ratios], random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(10_000))
    found = {"ratio": statistics.fmean(logs), "low": means[249], "high": means[9749]}
    return {name: math.exp(value) for name, value in found.items()}


def in_turn(what: str, names: list[str], more: Words, pairs: int, steps: int, scratch: Path) -> Runs:
    """Run every set-up once for each pair, in another order each time."""
    runs: Runs = {name: [] for name in names}
    path = install(scratch / what / "package")
    for pair in range(pairs):
        for turn in range(len(names)):
            name = names[(turn + pair) % len(names)]
            found = train(SETUPS[name], more, steps, pair, scratch / what / f"{pair}-{turn}", path)
            runs[name].append(found)
            shown = f"{found['groups_per_s']:.2f} groups/s, reward {found['reward_last']:.3f}"
            print(f"{what} {pair} {name}: {shown}", file=sys.stderr, flush=True)
    return runs


def judged(runs: Runs) -> dict[str, Any]:
    """Return the runs, and the ratios to the best synchronous set-up."""
    names = list(runs)
    speed = {name: statistics.median(run["groups_per_s"] for run in found) for name, found in runs.items()}
    best = max((name for name in names if SETUPS[name].mode == "sync"), key=lambda name: speed[name])
    ratios = {
        name: interval([a["groups_per_s"] / b["groups_per_s"] for a, b in zip(runs[name], runs[best], strict=True)])
        for name in names
    }
    return {"best": best, "runs": runs, "ratios": ratios}


def bounds_missed(ratios: dict[str, dict[str, float]]) -> list[str]:
    """Return the modes whose best set-up is below the mode's bound at the lower end of its interval."""
    best: dict[str, float] = {}
    for name, ratio in ratios.items():
        best[SETUPS[name].mode] = max(best.get(SETUPS[name].mode, 0.0), ratio["low"])
    return [mode for mode, bound in BOUNDS.items() if best.get(mode, bound) < bound]


def show(part: str, found: dict[str, Any]) -> None:
    """Print the speeds of one part as a table."""
    print(f"\n{part}: ratios to {found['best']!r}")
    print(f"{'set-up':<22}{'groups/s':>9}{'ratio':>8}{'95 %':>14}{'reward':>8}{'CPU':>6}", end="")
    print(f"{'idle trainer':>14}{'idle rollout':>14}{'s/sync':>8}{'lag':>6}{'max':>5}")
    for name, runs in found["runs"].items():
        mean = {key: statistics.fmean(run[key] or 0.0 for run in runs) for key in runs[0] if key != "final"}
        ratio = found["ratios"][name]
        print(f"{name:<22}{mean['groups_per_s']:>9.2f}{ratio['ratio']:>8.3f}", end="")
        print(f"{ratio['low']:>8.3f}-{ratio['high']:.3f}{mean['reward_last']:>8.3f}{mean['utilisation']:>6.2f}", end="")
        print(f"{mean['bubble_trainer']:>14.2f}{mean['bubble_rollout']:>14.2f}{mean['sync_seconds']:>8.3f}", end="")
        print(f"{mean['lag_mean']:>6.2f}{max(run['lag_max'] for run in runs):>5}")


def main(arguments: list[str] | None = None) -> int:
    """Run; exit 1 when part ``fixed`` of a full run misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["plain", "fixed"], action="append")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learn", type=int, help="seeds for what is learnt (3, or 0 where there are few pairs)")
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    quick = options.pairs < 2 or options.steps < 20
    names = options.setups or list(QUICK if quick else SETUPS)
    size = options.pairs, options.steps
    parts = options.part or (["fixed"] if quick else ["plain", "fixed"])
    seeds = options.learn if options.learn is not None else 0 if quick else 3
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        steady: Words = STEADY
        if not quick:
            prepared = train(SETUPS["sync"], LEARNING, 60, 1000, scratch / "prepared", [])
            steady = (*STEADY, f"model.path={prepared['final']}")
        found = {
            part: judged(in_turn(part, names, steady + (FIXED if part == "fixed" else ()), *size, scratch))
            for part in parts
        }
        learnt = in_turn("learn", names, LEARNING, seeds, options.steps, scratch)
    rewards = {name: [run["reward_last"] for run in runs] for name, runs in learnt.items()}
    load = os.getloadavg()
    if options.json:
        about = {"load": load, "cpus": os.cpu_count(), "quick": quick}
        print(json.dumps({"parts": found, "rewards": rewards, **about}, indent=2))
    else:
        for part, result in found.items():
            show(part, result)
        for name, last in rewards.items() if seeds else ():
            print(f"reward over the last 20 of {options.steps} steps, {name}: {', '.join(f'{r:.3f}' for r in last)}")
        print(f"\nload {load[0]:.1f} on {os.cpu_count()} cores" + ("; too few runs to judge by" if quick else ""))
    missed = bounds_missed(found["fixed"]["ratios"]) if "fixed" in found else []
    if missed and not quick:
        print(f"below its bound: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed and not quick else 0


if __name__ == "__main__":
    raise SystemExit(main())
