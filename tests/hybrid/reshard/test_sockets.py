"""Send buffers: bounded where a connection stays within the host, left alone elsewhere."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rlctl.hybrid.reshard.sockets import bound_send_buffers
from rlctl.sync.layout import ParallelLayout
from tests.hybrid.reshard.gang import Gang
from tests.hybrid.reshard.test_layout_pairs import DENSE, plan_of

BOUND = 64 << 10


def buffer_of(found: socket.socket) -> int:
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.fixture(params=["127.0.0.1", "::1"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind((request.param, 0))
        listener.listen()
        there = stack.enter_context(socket.socket(family))
        there.connect(listener.getsockname())
        here, _ = listener.accept()
        stack.enter_context(here)
        yield here, there


def test_both_ends_are_bounded_and_carry_all(connection: tuple[socket.socket, socket.socket]) -> None:
    here, there = connection
    here.setblocking(False)
    before = buffer_of(there)
    assert bound_send_buffers(BOUND) >= 2
    assert buffer_of(here) == buffer_of(there) == 2 * BOUND != before
    assert not here.getblocking()
    assert there.getblocking()
    here.setblocking(True)
    sent = random.randbytes(1 << 20)
    sending = threading.Thread(target=here.sendall, args=(sent,))
    sending.start()
    got = bytearray()
    while len(got) < len(sent):
        got += there.recv(1 << 16)
    sending.join(30)
    assert got == sent


def test_others_are_left_alone(connection: tuple[socket.socket, socket.socket]) -> None:
    with ExitStack() as stack:
        listener, datagrams = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        kept = [*map(stack.enter_context, (listener, datagrams, *socket.socketpair()))]
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        before = [buffer_of(found) for found in kept]
        assert bound_send_buffers(BOUND) >= 2
        assert [buffer_of(found) for found in kept] == before


def test_a_default_timeout_is_given_to_nobody(connection: tuple[socket.socket, socket.socket]) -> None:
    here, there = connection
    before = buffer_of(here)
    socket.setdefaulttimeout(5)
    try:
        assert bound_send_buffers(BOUND) == 0
    finally:
        socket.setdefaulttimeout(None)
    assert buffer_of(here) == before
    assert there.getblocking()


def test_ranks_of_a_group_are_bounded_when_a_resharder_is_made(tmp_path) -> None:
    with Gang(4, tmp_path / "store") as gang:
        gang.call("warm_up", plan=plan_of(DENSE, ParallelLayout.fsdp(4), ParallelLayout.vllm(tp=4)), deadline=30.0)
        for buffers in gang.call("send_buffers"):
            assert len(buffers) >= 3
            assert set(buffers) == {512 << 10}
