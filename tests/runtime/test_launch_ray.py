"""Places on a Ray cluster: the same results, deaths told in seconds, nothing printed and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlctl.process import Child, ChildDied, start
from rlctl.runtime.launch.launcher import Launcher, Place
from rlctl.runtime.launch.making import make_launcher
from rlctl.runtime.launch.run_folder import VARIABLE, end_leftovers
from rlctl.runtime.ranks.engine import RankedEngine
from rlctl.runtime.ranks.supervisor import RankError, TrainerRanks
from rlctl.schema import Config
from tests.model.test_fsdp2 import LOSS, random_rows, setups
from tests.model.test_fsdp2 import folders as folders
from tests.runtime.test_launch_processes import config
from tests.test_process import gone

pytestmark = pytest.mark.ray

ECHO = "tests.process_targets:echo"
# Ray's processes take their time on a busy machine.
PATIENCE = 240.0


@dataclass
class Cluster:
    """A cluster that another process owns: its address, and the folder of its run."""

    owner: Child
    address: str
    folder: str
    output: Path


@pytest.fixture(scope="module")
def own_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run folders in a place of their own: other runs of this machine end leftovers, too."""
    tmp_path_factory.getbasetemp()  # where it would be without the next line
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", root)
        patch.setenv("TMPDIR", root)
        yield


@pytest.fixture(scope="module")
def cluster(own_root, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    output = tmp_path_factory.mktemp("cluster") / "printed"
    owner = start("tests.runtime.ray_targets:cluster", name="cluster", timeout=PATIENCE, output=output)
    with owner, pytest.MonkeyPatch.context() as patch:
        address, folder, secrets = owner.request(None, PATIENCE, tuple[str, str, dict[str, str]])
        for name, value in secrets.items():
            patch.setenv(name, value)
        yield Cluster(owner, address, folder, output)
        owner.close(60.0)


@pytest.fixture(scope="module")
def launcher(cluster: Cluster) -> Iterator[Launcher]:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    made = make_launcher(on_ray(cluster))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert made.address() == cluster.address
    assert made.one_machine()
    yield made
    made.close()


def on_ray(cluster: Cluster) -> Config:
    made = config(layout="separate", trainer_ranks=2, replicas=1)
    made.cluster.launcher = "ray"
    made.cluster.ray_address = cluster.address
    return made


def step(folder: Path, logs: Path, **options) -> str:
    """Return the digest of two ranks' model after one step."""
    engine = RankedEngine(TrainerRanks(setups(2, 1, folder), logs=logs, **options))
    try:
        import random

        random.seed(5)
        engine.update(random_rows(6), LOSS)
        return engine.params_digest()
    finally:
        engine.close()


def test_a_step_of_trainer_ranks_is_the_same_as_over_processes(launcher, folders, tmp_path):
    folder = folders["llama-tied"]
    starter, here = (lambda rank: launcher.starter(Place("trainer", rank))), launcher.here()
    over_ray = step(folder, tmp_path, starter=starter, meet_at=here)  # as on several machines
    assert over_ray == step(folder, tmp_path)


def test_a_rank_that_is_killed_is_told_with_its_last_lines(launcher, tmp_path):
    from tests.runtime.test_ranks import TARGET
    from tests.runtime.test_ranks import setups as bare

    ranks = TrainerRanks(
        bare(2, 20.0), logs=tmp_path, target=TARGET, starter=lambda r: launcher.starter(Place("trainer", r))
    )
    begin = time.monotonic()
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"trainer rank 1 of 2 died in echo: SIGKILL\n    rank 1 is up"):
        ranks.call("echo")
    assert time.monotonic() - begin < 15
    assert all(gone(pid) for pid in ranks.pids)


def test_an_actor_that_is_killed_is_told_and_its_place_comes_back(launcher, tmp_path, capfd):
    there = launcher.starter(Place("replica", 0))
    child = there(ECHO, name="server", timeout=PATIENCE, output=tmp_path / "log")
    child.request("print", 10.0)
    begin = time.monotonic()
    os.kill(psutil.Process(child.pid).ppid(), signal.SIGKILL)
    with pytest.raises(ChildDied, match=r"its host \(bundle 2: replica 0\) (died: Worker|closed its)"):
        child.request("sleep", 60.0)
    assert time.monotonic() - begin < 15
    assert child.tail(2) == ["on stdout", "on stderr"]
    assert gone(child.pid)
    with there(ECHO, name="server", timeout=PATIENCE) as again:
        assert again.request("x", 10.0) == "x"
    assert capfd.readouterr() == ("", "")


# A driver on the same cluster; it prints the ids of what it starts.
DRIVER = f"""
import sys, time
from tests.runtime.test_launch_processes import config
from rlctl.runtime.launch.launcher import Place
from rlctl.runtime.launch.making import make_launcher
made = config(layout="separate", trainer_ranks=1, replicas=1)
made.cluster.launcher = "ray"
launcher = make_launcher(made)
child = launcher.starter(Place("replica", 0))({ECHO!r}, name="echo", timeout={PATIENCE})
print(child.pid, child.request("grandchild", 10.0), flush=True)
if sys.stdin.readline() == "close\\n":
    launcher.close()
"""


@pytest.mark.parametrize("how", ["close", "return", "interrupt", "kill"])
def test_nothing_of_a_driver_is_left_however_it_ends_and_it_prints_nothing(cluster, how):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "RAY_ADDRESS": cluster.address}, text=True,
    )  # fmt: skip
    assert driver.stdout is not None
    child, grandchild = [int(word) for word in driver.stdout.readline().split()]
    if how == "interrupt":
        driver.send_signal(signal.SIGINT)
    if how == "kill":
        driver.kill()
    out, err = driver.communicate(f"{how}\n", timeout=PATIENCE)
    assert gone(child, 15.0)
    assert gone(grandchild, 15.0)
    assert out == ""
    assert err == "" or (how == "interrupt" and err.endswith("KeyboardInterrupt\n") and "\x1b" not in err)
    end_leftovers()


def test_the_next_run_finds_nothing_of_a_cluster_whose_owner_was_killed(cluster, launcher):
    """The last test: it ends the cluster."""
    launcher.close()  # or Ray would end this process, too
    mark = f"{VARIABLE}={cluster.folder}"
    marked = [p.pid for p in psutil.process_iter() if mark in " ".join(f"{k}={v}" for k, v in _environ(p).items())]
    assert len(marked) > 5
    cluster.owner.kill()
    end_leftovers()  # what the kernel and Ray have not ended by now
    assert all(gone(pid) for pid in marked)
    assert not Path(cluster.folder).exists()
    assert cluster.output.read_text() == ""


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
