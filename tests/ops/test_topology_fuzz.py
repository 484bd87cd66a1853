"""Two thousand damaged dumps, configurations, environments and documents: an answer or a readable error."""

from __future__ import annotations

from benchmarks.fuzz_topology import fuzz


def test_no_input_ends_in_a_traceback() -> None:
    counts = fuzz(0, 2000, seed=66)
    assert sum(counts.values()) == 2000
    # Both ends are reached: damage is noticed, and not everything is refused.
    for kind in ("dump answered", "dump refused", "configuration answered", "configuration refused"):
        assert counts[kind] > 20, counts
