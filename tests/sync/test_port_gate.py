"""Who gets through to a socket that listens to everybody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rlctl.sync.calls import call
from rlctl.sync.channel import Listener
from rlctl.sync.own_sockets import called, end, ends, established, listens, opened_by, own_sockets
from rlctl.sync.port_gate import PortGate


def listener(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104 - as a library does
    sock.listen()
    sock.settimeout(5)
    return sock


def lets_in(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with listener(request.param) as sock:
        yield sock


def test_only_the_address_meant_gets_through_and_only_while_the_gate_is_open(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    assert lets_in("127.0.0.2", port)
    gate = PortGate([listening.dup()], "127.0.0.1")
    assert not lets_in("127.0.0.1", port)
    gate.open()
    assert lets_in("127.0.0.1", port)
    assert not lets_in("127.0.0.2", port)
    gate.shut()
    assert not lets_in("127.0.0.1", port)


def test_connection_made_while_it_was_open_stays(listening: socket.socket) -> None:
    gate = PortGate([listening.dup()], "127.0.0.1")
    gate.open()
    with socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=5) as ours:
        gate.shut()
        assert gate.waiting() == 1
        theirs, _ = listening.accept()
        assert gate.waiting() == 0
        with theirs:
            ours.sendall(b"x" * 100_000)
            assert len(theirs.recv(100_000, socket.MSG_WAITALL)) == 100_000
            theirs.sendall(b"y")
            assert ours.recv(1) == b"y"


def test_address_of_ipv6() -> None:
    with listener(socket.AF_INET6) as sock:
        port = sock.getsockname()[1]
        if not lets_in("::1", port):
            pytest.skip("this machine has no IPv6")
        gate = PortGate([sock.dup()], "::1")
        assert not lets_in("::1", port)
        gate.open()
        assert lets_in("::1", port)
        assert not lets_in("127.0.0.1", port)


def test_sockets_of_this_process_are_found_and_told_apart(listening: socket.socket) -> None:
    address = ("127.0.0.1", listening.getsockname()[1])
    with socket.create_connection(address, timeout=5) as ours:
        theirs, _ = listening.accept()
        found = list(own_sockets())
        with theirs:
            assert [s.getsockname()[1] for s in found if listens(s) and s.getsockname()[1] == address[1]] == [
                address[1]
            ]
            pairs = [ends(s) for s in found]
            assert (("127.0.0.1", ours.getsockname()[1]), address) in pairs
            assert (address, ("127.0.0.1", ours.getsockname()[1])) in pairs
            assert established(ours)
            end(theirs)
            assert ours.recv(1) == b""
            assert not established(ours)
        for sock in found:
            sock.close()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_connection_that_gets_no_answer_is_found_and_ended(family: socket.AddressFamily, host: str) -> None:
    with listener(family) as sock, socket.socket(family) as calling:
        gate = PortGate([sock.dup()], "127.0.0.1")
        calling.settimeout(5)
        address = (host, sock.getsockname()[1])
        assert called(calling) is None
        connecting = call(lambda: calling.connect(address), "connect")
        until = time.monotonic() + 5
        while called(calling) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert called(calling) == address
        end(calling)
        with pytest.raises(OSError, match=r"reset|aborted|refused|not connected") as caught:
            connecting.result(timeout=3)
        assert not isinstance(caught.value, TimeoutError)
        gate.open()


def test_what_a_library_opens_is_told_from_a_listener_of_another_thread() -> None:
    begun = threading.Event()
    others: list[Listener] = []

    def ours() -> None:
        begun.wait(5)
        others.append(Listener("tcp:127.0.0.1:0", b"token"))

    thread = threading.Thread(target=ours)
    thread.start()

    def theirs() -> socket.socket:
        begun.set()
        time.sleep(0.2)
        return listener(socket.AF_INET)

    library, found = opened_by(theirs)
    thread.join(5)
    with library:
        assert [sock.getsockname() for sock in found] == [library.getsockname()]
    for sock in (*found, *others):
        sock.close()
