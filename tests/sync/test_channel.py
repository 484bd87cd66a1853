"""Messages: framed, bounded in time, and only between those who know the token."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.sync import addresses
from rlctl.sync.calls import call
from rlctl.sync.channel import MAX_FRAME, Channel, Listener, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import CorruptedError, DeadlineError, PeerLostError

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize("kind", ["unix", "deep", "nameless", "tcp"])
def test_messages_both_ways(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    if kind == "deep":
        path = tmp_path / ("folder " * 20) / "socket"
        path.parent.mkdir()
    kinds = {
        "unix": f"unix:{path}",
        "deep": f"unix:{path}",
        "nameless": f"unix:@{secrets.token_hex(16)}",
        "tcp": "tcp:127.0.0.1:0",
    }
    listener = Listener(kinds[kind], TOKEN)
    if kind in ("unix", "deep"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    payload = os.urandom(3 << 20)

    def client() -> None:
        with connect(listener.address, TOKEN, "server", Deadline(10)) as channel:
            channel.send(payload, Deadline(10))
            channel.send(b"", Deadline(10))

    thread = threading.Thread(target=client)
    thread.start()
    with listener.accept("client", Deadline(10)) as channel:
        assert channel.receive(Deadline(10)) == payload
        assert channel.receive(Deadline(10)) == b""
        with pytest.raises(PeerLostError, match="client is gone"):
            channel.receive(Deadline(10))
    thread.join(10)
    listener.close()
    assert [found for found in tmp_path.rglob("*") if not found.is_dir()] == []


def test_another_users_process_is_refused_where_no_file_keeps_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(f"unix:@{secrets.token_hex(16)}", TOKEN)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(addresses, "_ROOT", -1)
    accepting = call(lambda: listener.accept("client", Deadline(0.5)), "server")
    with pytest.raises(PeerLostError, match="refused"):
        connect(listener.address, TOKEN, "server", Deadline(5))
    assert isinstance(accepting.exception(5), DeadlineError)
    assert listener.refused == 1
    listener.close()


def test_a_peer_without_the_token_is_refused_and_the_right_one_still_gets_in() -> None:
    listener = Listener("tcp:127.0.0.1:0", TOKEN)
    refused: list[Exception] = []

    def clients() -> None:
        host, port = listener.address.split(":")[1:]
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            raw.recv(100)
        try:
            connect(listener.address, b"wrong", "server", Deadline(5))
        except PeerLostError as error:
            refused.append(error)
        connect(listener.address, TOKEN, "server", Deadline(5)).close()

    thread = threading.Thread(target=clients)
    thread.start()
    listener.accept("client", Deadline(10)).close()
    thread.join(10)
    assert listener.refused == 2
    assert "is the run's token the same?" in str(refused[0])
    listener.close()


def test_every_wait_ends() -> None:
    left, right = Channel.pair()
    for act in (left.receive, left.receive_fd):
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match="right"):
            act(Deadline(0.2))
        assert 0.15 < time.monotonic() - begin < 1
    with pytest.raises(DeadlineError, match="sending to right"):
        left.send(bytes(MAX_FRAME), Deadline(0.3))  # nobody reads
    listener = Listener("tcp:127.0.0.1:0", TOKEN)
    with pytest.raises(DeadlineError, match="waiting for rollout 3 to connect"):
        listener.accept("rollout 3", Deadline(0.2))
    listener.close()
    with pytest.raises(PeerLostError, match="does not listen"):
        connect(listener.address, TOKEN, "rollout 3", Deadline(1))
    left.close()
    right.close()


def test_an_oversized_frame_and_a_missing_file_are_refused() -> None:
    left, right = Channel.pair()
    left.send(bytes(100), Deadline(1))
    with pytest.raises(CorruptedError, match="announced a message of 100 bytes, more than 10"):
        right.receive(Deadline(1), limit=10)
    left, right = Channel.pair()
    left.send(b"no file", Deadline(1))
    with pytest.raises(CorruptedError, match="sent no file"):
        right.receive_fd(Deadline(1))


def test_addresses() -> None:
    for text in ("unix:", "tcp:1234", "tcp:host:port", "http://x"):
        with pytest.raises(UsageError, match="is not an address"):
            Listener(text, TOKEN)


def test_closing_leaves_the_file_to_an_accept_under_way() -> None:
    """Else its number is another socket's by the time that the accept waits on it."""
    listener = Listener("tcp:127.0.0.1:0", TOKEN)
    entered = threading.Event()
    seen: list[object] = []

    class Late(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            entered.set()
            time.sleep(0.2)
            seen.append(self.fileno() >= 0)
            return super().accept()

    listener._sock = Late(fileno=listener._sock.detach())

    def accept() -> None:
        try:
            listener.accept("nobody", Deadline(5))
        except OSError as error:
            seen.append(type(error))

    thread = threading.Thread(target=accept)
    thread.start()
    assert entered.wait(5)
    listener.close()
    thread.join(5)
    assert seen == [True, OSError]
    assert listener.fileno() < 0
