"""Runs that are killed at random points and resumed: nothing is lost, trained twice, or trained too late.

    python -m benchmarks.kill_soak [--kills 30] [--seed N] [--rounds NAME ...] [--json]

A round is one run of `rlctl train` over two epochs of a small data set, in one mode. Meanwhile its driver, a trainer
rank or a replica is sent SIGKILL, at a random moment; a run that has ended by that is resumed. Each round ends by
itself, and then the lineage of its final parameters (the events of all attempts less what was done again) must hold:

- every prompt of each epoch was trained exactly once, or, where admission drops, is listed as dropped;
- no token was older than the mode's bound when it was trained;
- a run that was not killed in an attempt ended well, and nothing of any attempt is left running.

Bound: no fault in 30 kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.run_events import faults_of, lag_of_tokens
from rlctl.experience.event_log import lineage, read_events
from rlctl.experience.events import Evicted
from rlctl.tasks.cycle import answer, prompt_text

ROWS, EPOCHS, PROMPTS = 50, 2, 4
ATTEMPT_SECONDS = 300.0
KILLS_A_ROUND = 3
NAMES = {"rank": "rlctl:trainer-", "replica": "rlctl:replica-"}


@dataclass(frozen=True)
class Kind:
    """A kind of round. ``targets``: what is killed; ``bound``: the greatest lag of a token."""

    words: tuple[str, ...]
    targets: tuple[str, ...]
    bound: int
    drops: bool = False


ALL = ("driver", "rank", "replica")
APART = ("--profile", "cpu-separate", "cluster.devices_per_node=3", "placement.replicas=2")
AHEAD = ("trainer.parameter_sync_step=1", "trainer.warmup_batches=2", "trainer.max_staleness=2")
KINDS = {
    "separate_async": Kind((*APART, "--mode", "separate_async", *AHEAD), ALL, 2),
    "separate_async, two updates a sync": Kind(
        (*APART, "--mode", "separate_async", "trainer.parameter_sync_step=2", "trainer.max_staleness=3"), ALL, 3
    ),
    "separate_async, dropping": Kind(
        (*APART, "--mode", "separate_async", *AHEAD, "trainer.admission=drop"), ALL, 2, drops=True
    ),
    "one_step_off": Kind((*APART, "--mode", "one_step_off"), ALL, 1),
    "sync": Kind((*APART, "--mode", "sync"), ALL, 0),
    "colocate_async": Kind(
        ("--profile", "cpu-quickstart", "--mode", "colocate_async", "trainer.max_staleness=2"), ("driver",), 2
    ),
}


@dataclass
class Round:
    """What became of one run. ``faults``: in words."""

    name: str
    seed: int
    kills: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    lags: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def write_rows(path: Path) -> None:
    """Write the data: problems of the built-in task, each once."""
    prompts = [prompt_text(97 * number, 2 + number % 9) for number in range(ROWS)]
    path.write_text("".join(json.dumps({"prompt": one, "answer": answer(one)}) + "\n" for one in prompts))


class Soak:
    """One round."""

    def __init__(self, name: str, seed: int, kills: int, folder: Path) -> None:
        self.kind, self.folder, self.wanted = KINDS[name], folder, kills
        self.round, self.draw = Round(name, seed), random.Random(seed)
        self.token = secrets.token_hex(16)
        folder.mkdir(parents=True)
        write_rows(folder / "rows.jsonl")
        self.events = folder / "run" / "events.jsonl"

    def go(self) -> Round:
        """Run to the end, however often it takes."""
        begin = time.monotonic()
        while not self.round.faults and not self._attempt():
            pass
        if not self.round.faults:
            self._judge()
        self.round.seconds = time.monotonic() - begin
        return self.round

    def _attempt(self) -> bool:
        """Start or resume the run; return whether it has ended well."""
        self.round.attempts += 1
        log = self.folder / f"attempt-{self.round.attempts}.err"
        with log.open("wb") as errors:
            process = subprocess.Popen(self._words(), stdout=subprocess.DEVNULL, stderr=errors, env=self._environment())
        end, killed = time.monotonic() + ATTEMPT_SECONDS, len(self.round.kills)
        try:
            while process.poll() is None and time.monotonic() < end:
                if len(self.round.kills) < self.wanted:
                    self._kill_later(process, end)
                else:
                    time.sleep(0.05)
            if process.poll() is None:
                self._fault(f"attempt {self.round.attempts} did not end in {ATTEMPT_SECONDS:.0f} s", log)
        finally:
            process.kill()
            process.wait()
        self._require_gone()
        if process.returncode and len(self.round.kills) == killed:
            self._fault(f"attempt {self.round.attempts} was not killed and ended with {process.returncode}", log)
        return process.returncode == 0

    def _kill_later(self, process: subprocess.Popen[bytes], end: float) -> None:
        """Wait for a random number of lines in the event log, and some more, then kill."""
        target = self.draw.choice(self.kind.targets)
        due, delay = self._lines() + self.draw.randrange(1, 700), self.draw.uniform(0, 0.4)
        while self._lines() < due:
            if process.poll() is not None or time.monotonic() > end:
                return
            time.sleep(0.01)
        time.sleep(delay)
        for pid in [process.pid] if target == "driver" else self._pids(process.pid, NAMES[target])[:1]:
            if process.poll() is None:
                self.round.kills.append(target)
                os.kill(pid, signal.SIGKILL)

    def _pids(self, driver: int, name: str) -> list[int]:
        found = []
        try:
            for child in psutil.Process(driver).children(recursive=True):
                command = child.cmdline()
                if command and command[-1].startswith(name):
                    found.append(child.pid)
        except psutil.Error:  # it has just ended
            return []
        self.draw.shuffle(found)
        return found

    def _lines(self) -> int:
        return self.events.read_bytes().count(b"\n") if self.events.exists() else 0

    def _words(self) -> list[str]:
        return [
            *(sys.executable, "-m", "rlctl", "train", "--json", "--run-dir", str(self.folder / "run")),
            *("--resume", "auto", "--task", str(self.folder / "rows.jsonl"), *self.kind.words),
            *("task.verifier=exact", f"task.epochs={EPOCHS}", "task.held_out=0", "run.steps=1000", "run.threads=1"),
            *(f"run.seed={self.round.seed % 1000}", "run.checkpoint_every=2", "run.validate_prompts=0"),
            *(f"trainer.prompts_per_step={PROMPTS}", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=96"),
            *("rollout.max_slots=16", "trainer.optimizer.lr=1e-4"),
        ]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RLCTL_RUN_TOKEN": self.token}

    def _require_gone(self) -> None:
        """All that an attempt has started must be gone soon after its driver."""
        end = time.monotonic() + 20
        while (left := [process for process in psutil.process_iter() if self._is_ours(process)]) and (
            time.monotonic() < end
        ):
            time.sleep(0.05)
        if left:
            self.round.faults.append(f"attempt {self.round.attempts} left {[' '.join(p.cmdline()) for p in left]}")

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RLCTL_RUN_TOKEN") == self.token and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def _judge(self) -> None:
        events = list(lineage(read_events(self.events).events))
        self.round.faults += faults_of(events, rows=ROWS, epochs=EPOCHS, bound=self.kind.bound, drops=self.kind.drops)
        self.round.lags = dict(sorted(lag_of_tokens(events).items()))
        self.round.dropped = sorted(event.ordinal for event in events if isinstance(event, Evicted))

    def _fault(self, message: str, log: Path) -> None:
        self.round.faults.append(f"{message}\n{log.read_text(errors='replace')[-2000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Run rounds until there were enough kills; exit 1 when one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rounds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--folder", type=Path, help="keep what the runs leave here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        while (done := sum(len(one.kills) for one in rounds)) < options.kills:
            name = options.rounds[len(rounds) % len(options.rounds)]
            kills = min(KILLS_A_ROUND, options.kills - done)
            found = Soak(name, seed + len(rounds), kills, folder / str(len(rounds))).go()
            rounds.append(found)
            print(describe(found), file=sys.stderr, flush=True)
            if found.faults:
                break
    faults = [fault for one in rounds for fault in one.faults]
    kills_of: dict[str, Any] = dict(Counter(target for one in rounds for target in one.kills))
    if options.json:
        print(json.dumps({"seed": seed, "kills": kills_of, "rounds": [vars(one) for one in rounds]}, indent=2))
    else:
        print(f"{sum(kills_of.values())} kills {kills_of} in {len(rounds)} rounds, {len(faults)} faults, seed {seed}")
    return 1 if faults else 0


def describe(one: Round) -> str:
    """Return a round in one line, and its faults."""
    line = f"{one.name} (seed {one.seed}): killed {one.kills}, {one.attempts} attempts, {one.seconds:.0f} s"
    return "\n  ".join([f"{line}, lags {one.lags}, dropped {one.dropped}", *one.faults])


if __name__ == "__main__":
    raise SystemExit(main())
