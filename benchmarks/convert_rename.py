"""Renaming every tensor of a sharded checkpoint against copying the folder with ``cp -r``."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.synthetic_model import config_of, write_model


def run(work: Path, *, gib: float, repeats: int) -> dict[str, Any]:
    """Time both, turn by turn, without and with waiting for the disk; every source page is in the page cache.

    The checkpoint bears the names that torch.compile leaves (``_orig_mod.``), and is converted to plain ones by the
    same calls that ``rlctl convert-keys --to hf`` makes. Returns median wall and CPU seconds and their ratios to cp.
    """
    source = work / "source"
    size = write_model(source, config_of(gib), prefix="_orig_mod.")
    sides: dict[str, Callable[[Path], None]] = {
        "cp": lambda out: _cp(source, out),
        "rlctl": lambda out: _rename(source, out, durable=False),
        "cp, then fsync": lambda out: _cp(source, out, durable=True),
        "rlctl, with fsync": lambda out: _rename(source, out, durable=True),
    }
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):  # the first turn warms page cache and imports
        for name, side in sorted(sides.items(), reverse=turn % 2 == 1):  # no side always follows the same other
            os.sync()  # what the side before left to write is not this one's
            start, used = time.perf_counter(), _cpu_seconds()
            side(work / "out")
            if turn:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(_cpu_seconds() - used)
            if turn == 0 and name == "rlctl":
                _check(source, work / "out")
            shutil.rmtree(work / "out")
    median = {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in sides}
    return {
        "bytes": size,
        "shards": len(list(source.glob("*.safetensors"))),
        "wall_s": {name: round(m[0], 2) for name, m in median.items()},
        "wall_s_range": {name: [round(min(wall[name]), 2), round(max(wall[name]), 2)] for name in sides},
        "cpu_s": {name: round(m[1], 2) for name, m in median.items()},
        "of_cp": {
            "wall": round(median["rlctl"][0] / median["cp"][0], 3),
            "best wall": round(min(wall["rlctl"]) / min(wall["cp"]), 3),
            "cpu": round(median["rlctl"][1] / median["cp"][1], 3),
            "wall, with fsync": round(median["rlctl, with fsync"][0] / median["cp, then fsync"][0], 3),
        },
    }


def _cp(source: Path, out: Path, *, durable: bool = False) -> None:
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)  # noqa: S607
    if durable:
        for path in out.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _rename(source: Path, out: Path, *, durable: bool) -> None:
    from rlctl.keys.convert import Conversion, prepare

    prepare(Conversion(source, "hf")).write(out, durable=durable)


def _check(source: Path, out: Path) -> None:
    """Every byte arrived under the plain name."""
    from rlctl.keys.checkpoint import Checkpoint

    with Checkpoint.open(source) as before, Checkpoint.open(out) as after:
        after.check()
        assert after.entries.keys() == {name.removeprefix("_orig_mod.") for name in before.entries}
        for name in before.entries:
            assert before.tensor(name).equal(after.tensor(name.removeprefix("_orig_mod."))), name


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
