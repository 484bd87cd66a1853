"""What others on the machine can reach, and what is left when a run is killed: for every backend, real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import UnavailableError
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import TransferError
from rlctl.sync.member_process import MemberProcess
from rlctl.sync.member_processes import MemberProcesses
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.shared_memory import FOLDER
from tests.sync.squad import Pool, Squad, cases, described_all, runnable

HARD, BLANK = "tests.sync.wire_cases:hard_tensors", "tests.sync.wire_cases:blank"


@pytest.fixture(params=cases())
def backend(request: pytest.FixtureRequest) -> str:
    runnable(request.param)
    return request.param


def members(squad: Squad) -> list[MemberProcess]:
    return [*squad.trainers.members, *squad.rollouts.members]


def test_a_peer_with_another_token_is_refused(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    ours, friends = squad.options, squad.rollouts
    theirs = replace(ours, timeout=0.5, token="another run's")  # noqa: S106
    squad.load(HARD, BLANK, seed=0)
    (untouched,) = squad.digests()
    squad.options = theirs
    squad.rollouts = MemberProcesses("rollout", friends.members, squad.backend, theirs)
    squad.rollouts.open(60)
    with pytest.raises(TransferError):
        squad.transfer(1)
    assert squad.digests() == [untouched]
    squad.options, squad.rollouts = ours, friends
    friends.open(60)
    squad.transfer(2)
    assert squad.digests() == [described_all(0)]


def test_sockets_are_on_loopback(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, BLANK, seed=0)

    def look() -> None:
        for member in members(squad):
            for address, port, listening in member.ask("sockets", {}, Deadline(20)):
                if address not in ("127.0.0.1", "::1"):  # a library's, which cannot be told: then nobody gets through
                    assert listening
                    assert not [host for host in ("127.0.0.1", "127.0.0.2") if lets_in(host, port)], address

    squad.prepare(Deadline(20))
    look()
    with squad.connected():
        look()
    squad.transfer(1)
    look()


def lets_in(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except OSError:
        return False
    return True


def shared_files(pid: int) -> Iterator[Path]:
    """Every file of shared memory that a process has open or mapped, by a path that leads to it while it runs."""
    folder = Path(f"/proc/{pid}")
    for entry in folder.joinpath("fd").iterdir():
        if str(entry.readlink()).startswith(("/memfd:", f"{FOLDER}/")):
            yield entry
    for line in folder.joinpath("maps").read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)
        if path.startswith(("/memfd:", f"{FOLDER}/")):
            yield folder / "map_files" / place


def test_shared_memory_is_private(pool: Pool, backend: str) -> None:
    squad = Squad(pool, backend, 1, 1)
    squad.load(HARD, BLANK, seed=0)
    squad.transfer(1)
    with squad.connected():
        for member in members(squad):
            modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in shared_files(member.pid)}
            assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
            for path in FOLDER.glob(f"rlctl-*-{member.pid}-*"):
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def names_of(pids: list[int]) -> set[Path]:
    """Whatever lies in the folder of shared memory and belongs to these processes: by its name, or because one of them
    has it open or mapped."""
    named = {path for pid in pids for path in FOLDER.glob(f"*-{pid}-*")}
    used = {link.readlink() for pid in pids for link in shared_files(pid)}
    return named | {path for path in used if path.is_relative_to(FOLDER) and path.exists()}


def test_nothing_is_left_of_processes_that_were_killed() -> None:
    """Of each backend one pair of engines has just begun a sync, another has done some."""
    pool = Pool()
    trainers, rollouts = pool.take(1, 1)
    ran = []
    try:
        for case in (case.values[0] for case in cases()):
            try:
                CHECKPOINT_ENGINES.load(case.partition(":")[0]).available()
            except UnavailableError:
                continue
            for begun in (True, False):
                squad = Squad(pool, case, 1, 1)
                squad.load(HARD, BLANK, seed=0)
                if not begun:
                    squad.transfer(1)
                squad.prepare(Deadline(20))
                for member in members(squad):
                    member.ask("set_aside", {}, Deadline(20))
            ran.append(case)
        pids = [trainers[0].pid, rollouts[0].pid]
        there = names_of(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while (left := {path for path in there if path.exists()}) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == set()
        assert {"gloo", "ipc:ring", "file"} <= set(ran)
    finally:
        pool.close()
