"""Plans for a model of a trillion parameters on 384 ranks: seconds, memory, traffic, balance, predicted seconds.

    python benchmarks/plan_scale.py

Links as on nodes of eight H100: 450 GB/s between devices of a node, one 400 Gbit/s card a device.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from rlctl.keys.presets import preset
from rlctl.sync.layout import ParallelLayout
from rlctl.sync.links import LinkModel, LinkSpeed
from rlctl.sync.placement import Cluster, Placement
from rlctl.sync.plan import Plan
from rlctl.sync.weights import model_weights

LINKS = LinkModel(LinkSpeed(2e12), LinkSpeed(450e9, 1e-5), LinkSpeed(50e9, 2e-5))
MEGATRON = ParallelLayout.megatron(tp=4, pp=8, dp=8, ep=32, layers=61)
CASES: dict[str, tuple[ParallelLayout, ParallelLayout]] = {
    "tp4 pp8 dp8 ep32 -> 4 engines of 32, ep": (MEGATRON, ParallelLayout.vllm(tp=8, dp=4, ep=True, replicas=4)),
    "tp4 pp8 dp8 ep32 -> 1 engine of 128, ep": (MEGATRON, ParallelLayout.vllm(dp=128, ep=True)),
    "FSDP 256 -> 4 engines of 32, ep": (ParallelLayout.fsdp(256), ParallelLayout.vllm(tp=8, dp=4, ep=True, replicas=4)),
    "FSDP 256, each matrix cut -> 16 engines of tp 8": (
        ParallelLayout(dp=256, shard=256), ParallelLayout.vllm(tp=8, replicas=16),
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, object]:
    """Plan one case in this process."""
    train, rollout = CASES[name]
    begin = time.process_time()
    weights = model_weights(preset("kimi-k2"))
    plan = Plan(weights, train, rollout, Placement.separate(Cluster(8, 8), 256, 128))
    seconds = time.process_time() - begin
    sent, received = plan.traffic.card_sent[:256], plan.traffic.card_received[256:]
    prediction = plan.predict(LINKS)
    return {
        "seconds": seconds,
        "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "transfers": sum(run.length for run in plan.runs),
        "runs": len(plan.runs),
        "tb": plan.bytes_moved / 1e12,
        "card_out": sent.max() / 1e9,
        "out_balance": sent.max() / sent.mean(),
        "in_balance": received.max() / received.mean(),
        "predicted": prediction.seconds,
        "bottleneck": prediction.bottleneck,
    }


def main() -> None:
    """Print the table, each case from a process of its own."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    print("| kimi-k2 bf16, 256 + 128 ranks | plan CPU s | peak memory | transfers (runs) | TB moved | busiest card "
          "sends / mean | receives / mean | predicted |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=300, check=True)
        r = json.loads(done.stdout)
        print(
            f"| {name} | {r['seconds']:.2f} | {r['gb']:.2f} GB | {r['transfers']:,} ({r['runs']:,}) | {r['tb']:.2f} | "
            f"{r['card_out']:.1f} GB, {r['out_balance']:.2f} | {r['in_balance']:.2f} | {r['predicted']:.2f} s "
            f"({r['bottleneck']}) |"
        )


if __name__ == "__main__":
    main()
