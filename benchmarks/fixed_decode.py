"""A rollout engine whose decode step costs the same whatever the rows, as a GPU's does at small batch.

It computes on the CPU what the embedded engine computes, and then sleeps, so that the core is free, until 3 ms have
passed since the step began. ``modes.py`` offers it to rlctl as a package of its own would: by an entry point.
"""

from __future__ import annotations

import time
from pathlib import Path

from rlctl.rollout.base import Output
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.rollout.traits import EngineTraits

NAME = "fixed-decode"
STEP_SECONDS = 0.003


class FixedDecodeEngine(EmbeddedEngine):
    """See the module."""

    traits = EngineTraits(("cpu",), tensor_parallel=False)

    def step(self) -> list[Output]:
        """See RolloutEngine."""
        begin, busy = time.perf_counter(), self.num_running > 0
        outputs = super().step()
        if busy:
            time.sleep(max(0.0, begin + STEP_SECONDS - time.perf_counter()))
        return outputs


def install(folder: Path) -> list[str]:
    """Write the metadata of a package that offers the engine, and return what ``PYTHONPATH`` needs."""
    info = folder / "fixed_decode-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fixed-decode\nVersion: 1\n")
    target = f"{NAME} = benchmarks.fixed_decode:FixedDecodeEngine"
    (info / "entry_points.txt").write_text(f"[rlctl.rollout_engines]\n{target}\n")
    return [str(folder), str(Path(__file__).parent.parent)]
