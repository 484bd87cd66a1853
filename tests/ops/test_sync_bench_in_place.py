"""The sync bench of a backend without two sides: what moves is what devices lack, and wrong bits are seen."""

from __future__ import annotations

import json

import pytest

from rlctl.cli.leaf import run
from rlctl.errors import UnavailableError
from rlctl.ops.sync_bench_choice import choose_backends
from rlctl.ops.sync_bench_in_place import InPlaceContestant
from rlctl.ops.sync_bench_options import BenchOptions, squads
from rlctl.ops.sync_bench_workload import equal_tensors
from rlctl.process import run_token
from rlctl.sync.engine import EngineOptions


def test_devices_take_what_they_lack_and_wrong_bits_are_counted() -> None:
    options = EngineOptions(bucket_size=64 << 10, timeout=60.0, token=run_token())
    contestant = InPlaceContestant("reshard", equal_tensors(3 << 20, 4), 1, 2, options)
    try:
        contestant.open()
        for step in (1, 2):
            sample = contestant.rep(step)
            # Two of three devices want it all, and hold a third, up to what does not divide.
            assert sample.bytes_moved == pytest.approx(2 * (3 << 20) * 2 / 3, rel=1e-3)
            assert (sample.wrong, sample.seconds > 0, sample.cpu_s > 0) == (0, True, True)
        contestant._all("mutate", step=3, change=1.0)
        assert contestant._wrong() == 2 * 4 * 3  # of two devices, each part of each tensor
    finally:
        contestant.close()


def test_the_command_measures_it_beside_another(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "reshard,ipc", "--size", "4MiB", "--tensors", "8", "--iters", "2", "--json"]
    assert run("sync-bench", arguments) == 0
    rows = {row["backend"]: row for row in json.loads(capfd.readouterr().out)["rows"]}
    assert rows["reshard"]["bytes_moved"] == 2 << 20  # of two devices one wants it all and holds half
    assert rows["reshard"]["wrong"] == 0
    assert rows["reshard"]["limit_ratio"]["wall"] > 0


def test_it_is_among_all_and_has_no_deltas_of_members() -> None:
    assert "reshard" in choose_backends(["all"])[0]
    with pytest.raises(UnavailableError, match="no two sides to be on two hosts"):
        choose_backends(["reshard"], across=True)
    tensors = equal_tensors(4096, 2)
    found = squads(BenchOptions(["reshard", "gloo"], tensors, buckets=[4096], delta=True))
    assert [(squad.backend, squad.variant) for squad in found] == [
        ("reshard", "full"), ("gloo", "full"), ("gloo", "delta")
    ]  # fmt: skip
