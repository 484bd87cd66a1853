"""The plan's predicted seconds against those of executed syncs.

    python benchmarks/plan_seconds.py [--backends gloo,ipc] [--iters 5]

For each transport and layout: a probe, then the sync itself, in turn. The probe syncs two sizes between one trainer and
one rollout worker, which gives the speed of a flow; two and one, and one and two, which gives that of a member's memory
and core; two and two, which gives what this host moves for all of them together. What does not grow with the size is
the sync's own, and grows with its members. None of them has seen the size that is predicted. Prints every row, the
median error and the rank correlation (Spearman's).
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rlctl.ops.sync_bench import plan_bench, run_bench
from rlctl.ops.sync_bench_options import BenchOptions
from rlctl.ops.sync_bench_workload import equal_tensors
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.links import LinkModel, LinkSpeed
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan
from rlctl.sync.weights import Weight

MIB = 1 << 20
BUCKET = 16 * MIB
PROBES = (48 * MIB, 240 * MIB)
# Trainers, rollout workers, MiB of the model.
LAYOUTS = ((1, 1, 128), (1, 1, 512), (2, 1, 96), (2, 1, 384), (1, 2, 96), (1, 2, 256), (2, 2, 128), (1, 3, 192),
           (3, 1, 256), (3, 2, 160))  # fmt: skip
TENSORS = 64
ITERS = 5


@dataclass(frozen=True)
class Row:
    """One executed layout of one transport."""

    backend: str
    layout: tuple[int, int, int]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Share by which the prediction is off."""
        return abs(self.predicted / self.measured - 1)


def executed(backend: str, trainers: int, rollouts: int, nbytes: int, iters: int) -> dict[str, float]:
    """Return way of the transport -> median seconds of a sync."""
    options = BenchOptions(
        [backend], equal_tensors(nbytes, TENSORS), trainers=trainers, rollouts=rollouts, buckets=(BUCKET,),
        iters=iters, verify="off",
    )  # fmt: skip
    result = run_bench(options, plan_bench(options))
    if result.failed:
        raise SystemExit(f"{backend}: {result.failed[0].error}")
    return {f"{row.backend} {row.variant}": row.time_s.p50 for row in result.rows}


def plan_of(trainers: int, rollouts: int, nbytes: int) -> Plan:
    """Return the plan of a bench: every trainer rank holds all, every rollout worker wants all."""
    weights = [Weight(m.name, tuple(m.shape), m.dtype) for m in equal_tensors(nbytes, TENSORS)]
    placement = Placement(
        Cluster(trainers + rollouts, 1), tuple(range(trainers)), tuple(range(trainers, trainers + rollouts))
    )
    return Plan(weights, ParallelLayout(dp=trainers), ParallelLayout(replicas=rollouts), placement)


def probed(backend: str, members: int) -> dict[str, LinkModel]:
    """Return way of the transport -> speeds of this host, measured now, for syncs of so many members."""
    small, large = PROBES
    ends = {n: {size: executed(backend, n, n, size // n, ITERS) for size in PROBES} for n in (1, 2)}
    between = [
        executed(backend, trainers, rollouts, large // rollouts, ITERS) for trainers, rollouts in ((2, 1), (1, 2))
    ]
    models = {}
    for way in ends[1][small]:
        flow, host = (LinkSpeed.fit([(size, found[way]) for size, found in ends[n].items()]) for n in (1, 2))
        # Of two and of four members; in between, and beyond, in proportion.
        each = (host.latency - flow.latency) / 2
        alone = [large / max(found[way] - flow.latency - each, 1e-9) for found in between]
        member = max(flow.bytes_per_second, *alone)
        models[way] = LinkModel(
            *[LinkSpeed(member)] * 3,
            host=LinkSpeed(max(member, host.bytes_per_second)),
            flow=LinkSpeed(flow.bytes_per_second),
            sync=max(flow.latency + each * (members - 2), 0.0),
        )
    return models


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's coefficient of pairs without ties."""
    ranks = [{value: place for place, value in enumerate(sorted(side))} for side in zip(*pairs, strict=True)]
    off = sum((ranks[0][a] - ranks[1][b]) ** 2 for a, b in pairs)
    return 1 - 6 * off / (len(pairs) * (len(pairs) ** 2 - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="gloo,ipc")
    parser.add_argument("--iters", type=int, default=ITERS)
    arguments = parser.parse_args()
    rows: list[Row] = []
    print(f"load {os.getloadavg()[0]:.1f}")
    for layout in LAYOUTS:
        trainers, rollouts, mib = layout
        for backend in arguments.backends.split(","):
            models = probed(backend, trainers + rollouts)
            plan = plan_of(trainers, rollouts, mib * MIB)
            for way, seconds in executed(backend, trainers, rollouts, mib * MIB, arguments.iters).items():
                predicted = plan.predict(models[way], bucket_nbytes=BUCKET)
                rows.append(Row(way, layout, predicted.seconds, seconds))
                row = rows[-1]
                print(
                    f"{way:12} {trainers} -> {rollouts}  {mib:4} MiB  predicted {row.predicted * 1e3:7.1f} ms "
                    f"({predicted.bottleneck})  measured {row.measured * 1e3:7.1f} ms  {row.error:.0%}",
                    flush=True,
                )
    print(f"{len(rows)} rows: median error {statistics.median(row.error for row in rows):.0%}, "
          f"rank correlation {rank_correlation([(r.predicted, r.measured) for r in rows]):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
