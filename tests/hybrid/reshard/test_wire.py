"""What the kernel saw on the loopback interface is what a switch reports."""

from __future__ import annotations

import time
from pathlib import Path

from rlctl.sync.layout import ParallelLayout
from tests.hybrid.reshard.gang import Gang
from tests.hybrid.reshard.test_layout_pairs import DENSE, plan_of

WIDE = DENSE | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "vocab_size": 4096}


def loopback() -> int:
    """Bytes that went over the loopback interface of this machine since it started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[0])


def test_the_loopback_interface_carries_what_is_reported(tmp_path: Path) -> None:
    plan = plan_of(WIDE, ParallelLayout.fsdp(4), ParallelLayout.vllm(tp=4))
    seen: list[float] = []
    with Gang(4, tmp_path / "store") as gang:
        gang.call("warm_up", plan=plan, deadline=30.0)
        # Strangers send on this interface, too: one switch that has it for itself is enough.
        patience = time.monotonic() + 100
        while not (seen and seen[-1] < 1.1) and time.monotonic() < patience:
            time.sleep(0.1 * bool(seen))
            before = loopback()
            assert [ranks for ranks, _, _ in gang.call("switch_again")] == [{}] * 4
            seen.append((loopback() - before) / plan.bytes_moved)
    print("loopback", seen[:20], seen[-1])
    assert min(seen) >= 1.0  # the rest is headers of packets
    assert seen[-1] < 1.1
