"""Who may reach NIXL's agents, and what they leave alone in their process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlctl.sync.backends.nixl import NixlEngine
from rlctl.sync.backends.nixl_door import Door
from rlctl.sync.calls import call
from rlctl.sync.channel import connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import PeerLostError
from tests.sync.nixl_weights import check
from tests.sync.side import side, together

pytestmark = pytest.mark.nixl


def test_a_stranger_learns_nothing_and_keeps_nobody_from_meeting() -> None:
    with side(NixlEngine, 1, 1) as engines:
        metadata = [engine.prepare() for engine in engines.all]
        assert engines.trainers[0].agent.name not in str(metadata)
        kwargs = NixlEngine.build_topology(1, 1, metadata)
        sender = call(lambda: engines.trainers[0].init_process_group(**kwargs[0]), "sender")
        with pytest.raises(PeerLostError, match="refused"):
            connect(metadata[0]["address"], b"another run", "trainer 0", Deadline(5))
        host, port = metadata[0]["address"].removeprefix("tcp:").rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"\x20\0\0\0" + bytes(32) + b"\x20\0\0\0" + bytes(32))
            heard = b"".join(iter(lambda: stranger.recv(4096), b""))
        assert len(heard) <= 2 * 36  # a nonce, and a proof that is worth nothing to whom has no token
        engines.rollouts[0].init_process_group(**kwargs[1])
        sender.result(5)


def test_one_that_knows_the_token_and_no_link_is_sent_away() -> None:
    with side(NixlEngine, 1, 1) as engines:
        metadata = [engine.prepare() for engine in engines.all]
        kwargs = NixlEngine.build_topology(1, 1, metadata)
        sender = call(lambda: engines.trainers[0].init_process_group(**kwargs[0]), "sender")
        with connect(metadata[0]["address"], b"test", "trainer 0", Deadline(5)) as channel:
            channel.send(b"some earlier sync", Deadline(5))
            with pytest.raises(PeerLostError):
                channel.receive(Deadline(5))
        connect(metadata[0]["address"], b"test", "trainer 0", Deadline(5)).close()
        engines.rollouts[0].init_process_group(**kwargs[1])
        sender.result(5)


STRANGER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as sock:
    print("in", flush=True)
    try:
        print(sock.recv(1), flush=True)
    except ConnectionError:
        print(b"", flush=True)
"""


def test_nobody_else_connects_to_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = []
    inner = Door.open

    def opened(door: Door) -> None:
        inner(door)
        for port in door.ports:
            stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(port)], stdout=subprocess.PIPE, text=True)
            strangers.append(stranger)
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "in\n"

    monkeypatch.setattr(Door, "open", opened)
    with side(NixlEngine, 1, 2) as engines:
        metadata = [engine.prepare() for engine in engines.all]
        ports = [port for engine in engines.all for port in engine.agent.door.ports]
        assert len(ports) == 3
        refuse(ports)
        kwargs = NixlEngine.build_topology(1, 2, metadata)
        together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(engines.all, kwargs, strict=True)))
        refuse(ports)
        assert strangers  # they came in the moment in which the door was open
        for stranger in strangers:
            assert stranger.communicate(timeout=20)[0] == "b''\n"
        check(engines, 1)


def refuse(ports: list[int]) -> None:
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.1)


def test_this_process_is_left_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    environment, hangup = dict(os.environ), caught(signal.SIGHUP)
    before = set(psutil.Process().net_connections("all"))
    with side(NixlEngine, 1, 2, extras={"topology": "chain"}) as engines:
        check(engines, 1)
        assert dict(os.environ) == environment
        assert caught(signal.SIGHUP) == hangup
        fresh = set(psutil.Process().net_connections("all")) - before
        listening = [c.laddr.ip for c in fresh if c.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}
        assert not [c for c in fresh if c.family == socket.AF_UNIX and c.laddr]
        files = [link for fd in Path("/proc/self/fd").iterdir() if (link := read_link(fd))]
        assert not [link for link in files if "ucx" in link]  # what a killed process would leave
    for _ in range(50):
        left = [c for c in psutil.Process().net_connections("all") if c.status == psutil.CONN_LISTEN]
        if not set(left) - before:
            break
        time.sleep(0.1)
    assert not set(left) - before
    assert capfd.readouterr().out == ""


def caught(number: int) -> bool:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""
