"""Where trainer ranks find each other."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlctl.runtime.ranks.meeting import FileMeeting, Meeting, TcpMeeting, store_of
from rlctl.sync.addresses import own_address
from rlctl.sync.engine import EngineOptions
from rlctl.sync.worker_process import WorkerProcesses

# A rank that is another process: it leaves word and waits for an answer.
OTHER = """
import sys
from rlctl.runtime.ranks.meeting import store_of
store = store_of(sys.argv[1], 2, 60.0)
store.set("word", sys.argv[2])
print(store.get("answer").decode())
"""


@pytest.mark.parametrize("make", [FileMeeting, lambda: TcpMeeting("127.0.0.1")], ids=["file", "tcp"])
def test_two_ranks_meet(make):
    word = str(random.randrange(1 << 30))
    print("word", word)
    meeting: Meeting = make()
    try:
        with subprocess.Popen([sys.executable, "-c", OTHER, meeting.store, word], stdout=subprocess.PIPE) as other:
            store = store_of(meeting.store, 2, 60.0)
            assert store.get("word").decode() == word
            store.set("answer", word[::-1])
            assert other.communicate(timeout=60)[0].decode().strip() == word[::-1]
            del store
    finally:
        meeting.close()
        meeting.close()


def test_over_tcp_it_listens_at_its_address_alone_and_until_it_is_closed():
    meeting = TcpMeeting("127.0.0.1")
    port = int(meeting.store.rpartition(":")[2])
    mine = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [address.ip for address in mine if address.port == port] == ["127.0.0.1"]
    meeting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_an_interface_is_its_address_on_this_machine():
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found)
    )
    assert own_address(loopback) == "127.0.0.1"
    assert own_address("10.1.2.3") == "10.1.2.3"
    assert EngineOptions(interface=loopback).host == "127.0.0.1"
    assert EngineOptions().host == "127.0.0.1"


def test_workers_on_other_machines_are_not_found_by_a_folder_of_this_one():
    here, anywhere = (
        WorkerProcesses("gloo", EngineOptions()),
        WorkerProcesses("gloo", EngineOptions(), one_machine=False),
    )
    try:
        assert Path(here.address("r").removeprefix("unix:")).parent.is_dir()
        names = {anywhere.address(replica, part) for replica in ("r", "s") for part in (0, 1)}
        assert len(names) == 4
        assert all(name.startswith("unix:@rlctl-") for name in names)
    finally:
        here.close()
        anywhere.close()
