"""Many syncs with a fault in each: none may hang, serve a mix, or keep the next from succeeding.

    PYTHONPATH=. python benchmarks/sync_soak.py --backend gloo --trials 200

Real processes, killed, stopped, stalled and fed damaged bytes at random buckets. Stops at the first rule broken.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from rlctl.sync.faults import RECEIVER, SENDER
from rlctl.sync.states import Ending
from tests.sync.drills import Trial, recover, strike
from tests.sync.squad import Managed, Pool, Squad

TIMEOUT = 5.0


def one(managed: Managed, rng: random.Random, version: int) -> tuple[str, Trial]:
    """One trial of a random kind."""
    side = rng.choice(["sender", "receiver"])
    kind = rng.choice(SENDER if side == "sender" else (*RECEIVER, "stop"))
    place = 0 if side == "sender" else rng.randrange(len(managed.served))
    at, seconds = rng.randrange(8), rng.choice([0.5, TIMEOUT + 1])
    if kind == "stop":
        seconds = rng.uniform(0.0, 0.1)
    return f"{side} {kind}", strike(managed, side, place, {"kind": kind, "at": at, "seconds": seconds}, version)


def main() -> None:
    """Run the trials and print what ended how."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--delta", action="store_true", help="send what changed")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    rng, pool = random.Random(args.seed), Pool()
    endings: Counter[str] = Counter()
    longest, begin = 0.0, time.monotonic()
    try:
        options = {"timeout": TIMEOUT, "senders": args.trainers, "delta": args.delta}
        squad = Squad(pool, args.backend, args.trainers, args.rollouts, **options)
        by_policy = {}
        for commit in ("inplace", "staged"):
            by_policy[commit] = Managed(squad, drift=args.delta, commit=commit, timeout=TIMEOUT, delta=args.delta)
        version = 0
        for trial in range(args.trials):
            managed = by_policy["staged" if trial % 20 >= 10 else "inplace"]
            managed.wait_for_processes()  # on a busy machine a killed one takes longer to start than a sync may
            recover(managed, version)
            name, outcome = one(managed, rng, version + 1)
            version += 2
            longest = max(longest, outcome.seconds)
            endings[f"{managed.policy.commit:8} {name:22} {outcome.report.ending}"] += 1
            print(f"{trial + 1} {name} {outcome.report.ending} {outcome.seconds:.2f} s", flush=True)
        recover(managed, version)
    finally:
        pool.close()
    for line, count in sorted(endings.items()):
        print(f"{count:4} {line}")
    legal = {str(e) for e in Ending}
    assert all(line.split()[-1] in legal for line in endings)
    print(f"{args.trials} trials in {time.monotonic() - begin:.0f} s; longest sync {longest:.2f} s of {TIMEOUT} + 1")


if __name__ == "__main__":
    main()
