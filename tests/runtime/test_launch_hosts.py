"""Processes of a host: like children of the run, over TCP, and gone when the host or the run is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlctl.process import Child, ChildDied, run_token, start
from rlctl.runtime.launch import host_messages, remote
from rlctl.runtime.launch.desk import Desk
from rlctl.runtime.launch.host_messages import Hello
from rlctl.runtime.launch.remote import HostLink
from rlctl.sync.channel import connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError
from tests.test_process import gone

ECHO = "tests.process_targets:echo"


class Node:
    """A desk, a host, and the link between the two."""

    def __init__(self, *, near: bool = True, carried: dict[str, str] | None = None) -> None:
        self.desk = Desk("tcp:127.0.0.1:0", run_token())
        self.host = start("tests.runtime.host_targets:main", name="host", env={"HOSTS_OWN": "1", "RAY_JOB_ID": "2"})
        self.host.channel.send([self.desk.address, run_token(), 7], 10.0)
        channel = self.desk.take(Hello(7, -1), Deadline(60))
        self.link = HostLink(
            channel, 7, self.desk, label="bundle 0", near=near, carried=carried or {}, why=self.host.ending
        )

    def start(self, target: str = ECHO, *, name: str = "echo", timeout: float = 60.0, **more: Any) -> Child:
        given: dict[str, Any] = {"output": None, "env": {}, "kind": "cpu", "devices": (0,), **more}
        return self.link.start(target, name=name, timeout=timeout, **given)

    def close(self) -> None:
        self.link.close()
        self.host.kill()
        self.desk.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.fixture
def child(shared: Node) -> Iterator[Child]:
    with shared.start() as made:
        yield made


def test_messages_survive_exactly(child: Child):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for message in (None, "é\x00", {"a": [1, {"b": b""}]}, b"\xff" * 3_000_000, rng.randbytes(rng.randrange(1 << 20))):
        assert child.request(message, 30.0) == message


@pytest.mark.parametrize(("message", "reason"), [("crash", "SIGSEGV"), ("leave", "exit code 3")])
def test_a_death_is_told_with_its_reason(child: Child, message: str, reason: str):
    with pytest.raises(ChildDied, match=f"'echo' died: {reason}"):
        child.request(message, 10.0)
    assert not child.alive()
    child.kill()


def test_no_answer_in_time_is_a_timeout_and_the_child_can_be_killed(child: Child):
    with pytest.raises(TimeoutError):
        child.request("sleep", 0.2)
    assert child.alive()
    child.kill()
    assert not child.alive()
    assert gone(child.pid)


def test_a_kill_reaches_the_childs_own_children_and_closing_ends_it_without_force(shared: Node):
    first, second = shared.start(), shared.start(name="other")
    grandchild = first.request("grandchild", 10.0, int)
    first.kill()
    assert gone(grandchild)
    second.close(grace=10.0)
    assert second.ending() == "exit code 0"


def test_sigterm_that_is_ignored_is_followed_by_sigkill_and_signals_arrive(child: Child):
    child.request("ignore sigterm", 10.0)
    child.channel.send("sleep", 10.0)
    child.kill(grace=0.2)
    assert child.ending() == "SIGKILL"
    child.signal(signal.SIGTERM)


@pytest.mark.parametrize("near", [True, False])
def test_what_it_prints_is_here_when_its_end_is_told(near: bool, tmp_path: Path):
    node = Node(near=near)
    log = tmp_path / "log"
    log.write_text("earlier\n")
    try:
        child = node.start(output=log)
        child.request("print", 10.0)
        with pytest.raises(ChildDied):
            child.request("leave", 10.0)
        assert log.read_text().splitlines() == ["earlier", "on stdout", "on stderr"]
        assert child.tail(1) == ["on stderr"]
        with pytest.raises(FileNotFoundError):
            node.start(output=tmp_path / "nowhere" / "log")
    finally:
        node.close()


def test_a_target_that_cannot_be_imported_is_named_and_the_host_goes_on(shared: Node):
    with pytest.raises(ChildDied, match="'lost' died: ModuleNotFoundError: No module named 'no_such'"):
        shared.start("no_such.module:function", name="lost")
    with pytest.raises(TimeoutError):
        shared.start("tests.process_targets:slow_start", timeout=0.01)
    assert shared.start().request("x", 10.0) == "x"


def test_near_the_run_a_process_has_the_runs_environment_and_elsewhere_the_hosts(monkeypatch: pytest.MonkeyPatch):
    for near, runs, hosts in ((True, "1", None), (False, None, "1")):
        monkeypatch.delenv("RUNS_OWN", raising=False)
        node = Node(near=near, carried={"CARRIED": "yes"})
        monkeypatch.setenv("RUNS_OWN", "1")
        try:
            child = node.start(env={"MORE": "m"}, kind="cuda", devices=(3, 1))
            assert child.request("env RUNS_OWN", 10.0) == runs
            assert child.request("env HOSTS_OWN", 10.0) == hosts
            assert child.request("env RAY_JOB_ID", 10.0) is None
            assert child.request("env CARRIED", 10.0) == "yes"
            assert child.request("env MORE", 10.0) == "m"
            assert child.request("env CUDA_VISIBLE_DEVICES", 10.0) == "3,1"
            assert child.request("token", 10.0) == run_token()
        finally:
            node.close()


def test_a_host_that_dies_takes_its_processes_along_and_says_why(node: Node):
    first, second = node.start(), node.start(name="other")
    begin = time.monotonic()
    os.kill(node.host.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match=r"'echo' died: its host \(bundle 0\) SIGKILL"):
        first.request("sleep", 30.0)
    assert time.monotonic() - begin < 10
    assert not second.alive()
    assert gone(first.pid)
    assert gone(second.pid)
    with pytest.raises(ChildDied, match="its host"):
        node.start()


def test_a_host_that_says_nothing_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_messages, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 2.0)
    node = Node()
    try:
        child = node.start()
        node.host.signal(signal.SIGSTOP)
        with pytest.raises(ChildDied, match=r"its host \(bundle 0\) said nothing for 2 s"):
            child.request("sleep", 60.0)
        node.host.signal(signal.SIGCONT)  # it finds the run gone, as after a break of the network
        assert gone(child.pid)
    finally:
        node.close()


def test_many_at_once(node: Node):
    with ThreadPoolExecutor(6) as pool:
        children = list(pool.map(lambda n: node.start(name=f"echo-{n}"), range(6)))
        assert list(pool.map(lambda c: c.request(c.name, 30.0), children)) == [c.name for c in children]
    node.link.close()
    assert not any(c.alive() for c in children)
    assert all(gone(c.pid) for c in children)


def test_who_does_not_know_the_token_is_refused(shared: Node):
    with pytest.raises(PeerLostError, match="refused"):
        connect(shared.desk.address, b"guessed", "the run", Deadline(10))


def test_nothing_outlives_a_run_that_is_killed():
    code = (
        "import time\nfrom tests.runtime.test_launch_hosts import Node\nnode = Node()\nchild = node.start()\n"
        "print(node.host.pid, child.pid, child.request('grandchild', 10.0), flush=True)\ntime.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout is not None
    _, *pids = [int(word) for word in run.stdout.readline().split()]
    run.kill()
    run.wait(10)
    run.stdout.close()
    assert len(pids) == 2
    assert gone(pids[0])
