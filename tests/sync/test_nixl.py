"""What is NIXL's own: who reads what from whom, memory registered once, strangers, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlctl.errors import UnavailableError
from rlctl.sync.backends import nixl_library
from rlctl.sync.backends.nixl import NixlEngine
from rlctl.sync.backends.nixl_agent import Batch, NixlAgent, Place
from rlctl.sync.backends.nixl_door import Door
from rlctl.sync.backends.nixl_links import Outlet
from rlctl.sync.calls import call
from rlctl.sync.channel import connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import CorruptedError, PeerLostError
from rlctl.sync.member import described
from rlctl.sync.runs import APART_NBYTES
from tests.sync.probes import big
from tests.sync.squad import Managed, Pool, Squad, runnable
from tests.sync.wire_cases import assert_same, blank, hard_tensors

pytestmark = pytest.mark.nixl
Weights = dict[str, torch.Tensor]
HARD, BLANK, BIG = "tests.sync.wire_cases:hard_tensors", "tests.sync.wire_cases:blank", "tests.sync.probes:big"


def mixed(seed: int) -> Weights:
    """Small tensors among large ones, one of them larger than a bucket of 1 MiB."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"a": 300, "b": 200 << 10, "c": 5, "d": 3 << 20, "e": 700, "f": 900 << 10, "g": 129 << 10}
    return {name: torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8) for name, size in sizes.items()}


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run all at once, each in its thread, and return their results."""
    return [future.result(30) for future in [call(action, "test") for action in actions]]


class Side:
    """Engines of both sides in this process."""

    def __init__(self, trainers: int, rollouts: int, **options: Any) -> None:
        given = EngineOptions(**{"bucket_size": 1 << 20, "timeout": 10.0, "token": "nixl", **options})
        self.trainers = [NixlEngine(Member("trainer", rank, trainers), given) for rank in range(trainers)]
        self.rollouts = [NixlEngine(Member("rollout", rank, rollouts), given) for rank in range(rollouts)]
        self.all = [*self.trainers, *self.rollouts]

    def meet(self) -> None:
        metadata = [engine.prepare() for engine in self.all]
        kwargs = NixlEngine.build_topology(len(self.trainers), len(self.rollouts), metadata)
        together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(self.all, kwargs, strict=True)))

    def sync(self, version: int, source: Weights, targets: list[Weights]) -> None:
        self.meet()
        together(
            *(lambda e=e: e.send_weights(source.items(), version) for e in self.trainers),
            *(lambda e=e, t=t: e.receive_into(version, t) for e, t in zip(self.rollouts, targets, strict=True)),
        )
        for engine in self.all:
            engine.finalize()

    def check(self, version: int) -> None:
        """Sync tensors that nobody bound."""
        targets = [blank(0) for _ in self.rollouts]
        self.sync(version, hard_tensors(0, version), targets)
        for target in targets:
            assert_same(hard_tensors(0, version), target)


@contextmanager
def side(trainers: int, rollouts: int, **options: Any) -> Iterator[Side]:
    made = Side(trainers, rollouts, **options)
    yield made
    for engine in made.all:
        engine.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Place, Place]]:
    """Everything that is read: from whom, here, there."""
    found: list[tuple[str, Place, Place]] = []
    inner = NixlAgent.read

    def noted(agent: NixlAgent, name: str, peer: str, batch: Batch) -> Any:
        found.extend((peer, here, there) for here, there in batch.pairs if here.nbytes != 64)  # the rest is a greeting
        return inner(agent, name, peer, batch)

    monkeypatch.setattr(NixlAgent, "read", noted)
    return found


def lies_in(place: Place, weights: Weights) -> bool:
    return any(t.data_ptr() <= place.address < t.data_ptr() + t.nbytes for t in weights.values())


def test_large_tensors_go_from_where_they_lie_to_where_they_belong(reads: list[tuple[str, Place, Place]]) -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    large = sum(t.nbytes for t in source.values() if t.nbytes >= APART_NBYTES)
    with side(1, 2) as engines:
        engines.trainers[0].bind(source)
        for engine, target in zip(engines.rollouts, targets, strict=True):
            engine.bind(target)
        for version in range(3):
            reads.clear()
            source["d"].add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
            into_targets = [pair for pair in reads if any(lies_in(pair[1], target) for target in targets)]
            straight = [here.nbytes for _, here, there in into_targets if lies_in(there, source)]
            assert sum(straight) == 2 * large
            assert sum(here.nbytes for _, here, _ in reads) - sum(straight) < 2 * 4096


def test_what_is_not_bound_goes_through_buckets(reads: list[tuple[str, Place, Place]]) -> None:
    source, target = mixed(1), mixed(2)
    large = sum(t.nbytes for t in source.values() if t.nbytes >= APART_NBYTES)
    with side(1, 1) as engines:
        for version, straight in enumerate((0, large)):  # the same targets once more are worth being registered
            reads.clear()
            source["b"].add_(1)
            engines.sync(version, source, [target])
            assert_same(source, target)
            assert not any(lies_in(there, source) for *_, there in reads)
            assert sum(here.nbytes for _, here, _ in reads) >= large
            assert sum(here.nbytes for _, here, _ in reads if lies_in(here, target)) == straight


@pytest.mark.parametrize("extras", [{}, {"topology": "chain"}], ids=["direct", "chain"])
def test_what_is_kept_of_a_sync_serves_the_next_until_something_changes(
    extras: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    inner = NixlAgent._prepared

    def noted(agent: NixlAgent, name: str, peer: str, pairs: Any) -> Any:
        prepared.append(peer)
        return inner(agent, name, peer, pairs)

    monkeypatch.setattr(NixlAgent, "_prepared", noted)
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(1, 2, verify="off", extras=extras) as engines:

        def bind() -> None:
            engines.trainers[0].bind(source)
            for engine, target in zip(engines.rollouts, targets, strict=True):
                engine.bind(target)

        def sync(version: int) -> int:
            prepared.clear()
            for tensor in source.values():
                tensor.add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
            return len(prepared)

        bind()
        assert sync(0) > 0
        assert [sync(1), sync(2), sync(3)] == [0, 0, 0]
        source = mixed(4)  # elsewhere
        bind()
        assert sync(4) > 0
        targets = [mixed(5), mixed(6)]
        bind()
        assert sync(5) > 0
        source = {name: torch.cat([tensor, tensor]) for name, tensor in source.items() if tensor.dim()}  # other shapes
        targets = [{name: torch.zeros_like(tensor) for name, tensor in source.items()} for _ in range(2)]
        bind()
        assert sync(6) > 0
        for tensor in source.values():  # elsewhere, and nobody was told
            tensor.data = tensor.clone()
        sync(7)
        for tensor in targets[0].values():
            tensor.data = tensor.clone()
        sync(8)
        sync(9)
        assert sync(10) == 0


def test_memory_that_is_used_once_is_let_go() -> None:
    source = mixed(1)
    targets = [mixed(2) for _ in range(5)]  # all alive: none lies where an earlier one did
    with side(1, 1) as engines:
        for version in range(5):
            engines.sync(version, source, [targets[version]])
            assert len(engines.rollouts[0].agent._regions) < 3 + len(source)


def test_in_a_chain_each_reads_from_the_one_before_while_that_receives(
    reads: list[tuple[str, Place, Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, targets = mixed(1), [mixed(seed) for seed in (2, 3, 4)]
    last = source["g"].data_ptr()
    inner = NixlAgent.read

    def held_up(agent: NixlAgent, name: str, peer: str, batch: Batch) -> Any:
        # The first does not get it before the last has something.
        if any(there.address == last for _, there in batch.pairs):
            for _ in range(500):
                if any(other == "rollout 1" for other, *_ in reads):
                    break
                agent.progress()
                time.sleep(0.01)
            else:
                raise AssertionError("rollout 2 waits for rollout 1 to be through")
        return inner(agent, name, peer, batch)

    monkeypatch.setattr(NixlAgent, "read", held_up)
    with side(1, 3, extras={"topology": "chain"}) as engines:
        engines.trainers[0].bind(source)
        for engine, target in zip(engines.rollouts, targets, strict=True):
            engine.bind(target)
        for version in range(3):
            reads.clear()
            source["b"].add_(1)
            engines.sync(version, source, targets)
            for target in targets:
                assert_same(source, target)
        nbytes = {peer: sum(here.nbytes for other, here, _ in reads if other == peer) for peer, *_ in reads}
        assert set(nbytes) == {"trainer 0", "rollout 0", "rollout 1"}
        assert len(set(nbytes.values())) == 1


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 3), (2, 2)])
def test_a_chain_of_processes(pool: Pool, trainers: int, rollouts: int) -> None:
    runnable("nixl")
    squad = Squad(pool, "nixl", trainers, rollouts, senders=trainers, extras={"topology": "chain"})
    for version in range(3):
        squad.load(HARD, BLANK, seed=version)
        squad.transfer(version)
        expected = {name: described(name, tensor) for name, tensor in hard_tensors(version).items()}
        assert squad.digests() == [expected] * rollouts


def test_a_broken_chain_is_closed_again(pool: Pool) -> None:
    managed = Managed(
        Squad(pool, "nixl", 1, 3, timeout=10.0, extras={"topology": "chain"}), commit="inplace", timeout=10.0
    )
    managed.load_version(1)
    managed.squad.rollouts.members[1].ask("inject", {"fault": {"kind": "kill", "at": 1}}, Deadline(20))
    report = managed.sync(1)
    assert list(report.fenced) == ["rollout 1"]
    assert sorted(report.committed) == ["rollout 0", "rollout 2"]
    managed.wait_for_processes()
    managed.load_version(2)
    assert len(managed.sync(2).committed) == 3
    managed.assert_whole()


def test_damage_in_tensors_that_are_read_where_they_lie(pool: Pool) -> None:
    squad = Squad(pool, "nixl", 1, 1, bucket_size=4 << 20)
    squad.load_source(BIG, seed=1)
    squad.rollouts.ask("load", Deadline(60), factory=BIG, arguments={"seed": 2})
    expected = {name: described(name, tensor) for name, tensor in big(1).items()}
    squad.trainers.members[0].ask("inject", {"fault": {"kind": "flip", "at": 2}}, Deadline(20))
    with pytest.raises(CorruptedError, match="did not arrive as it was sent"):
        squad.transfer(1)
    assert squad.trainers.ask("digest", Deadline(20)) == [expected]
    squad.transfer(2)
    assert squad.digests() == [expected]


def test_memory_is_registered_once() -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(1, 1) as engines:
        engines.trainers[0].bind(source)
        engines.rollouts[0].bind(targets[0])
        for version in range(4):  # as with a shadow: two sets of targets in turn
            engines.sync(version, source, [targets[version % 2]])
        agents = [engine.agent for engine in engines.all]
        registered = [agent.registrations for agent in agents]
        for version in range(4, 8):
            engines.sync(version, source, [targets[version % 2]])
        assert [engine.agent for engine in engines.all] == agents
        assert [agent.registrations for agent in agents] == registered
        other = mixed(4)
        engines.rollouts[0].bind(other)  # nothing of what was bound before is kept
        engines.sync(8, source, [other])
        assert engines.rollouts[0].agent is not agents[1]
        assert_same(source, other)


def test_agents_are_made_anew_when_told_so() -> None:
    with side(1, 1, extras={"keep_agents": False}) as engines:
        for version in range(2):
            engines.check(version)
            assert [engine._agent for engine in engines.all] == [None, None]


@pytest.mark.parametrize("topology", ["direct", "chain"])
def test_over_tcp_alone_agents_answer_while_they_wait(topology: str) -> None:
    with side(1, 2, extras={"transports": "tcp", "topology": topology}) as engines:
        for version in range(2):
            engines.check(version)
        source, targets = mixed(1), [mixed(2), mixed(3)]
        engines.sync(2, source, targets)
        for target in targets:
            assert_same(source, target)


def test_a_stranger_learns_nothing_and_keeps_nobody_from_meeting() -> None:
    with side(1, 1) as engines:
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
    with side(1, 1) as engines:
        metadata = [engine.prepare() for engine in engines.all]
        kwargs = NixlEngine.build_topology(1, 1, metadata)
        sender = call(lambda: engines.trainers[0].init_process_group(**kwargs[0]), "sender")
        with connect(metadata[0]["address"], b"nixl", "trainer 0", Deadline(5)) as channel:
            channel.send(b"some earlier sync", Deadline(5))
            with pytest.raises(PeerLostError):
                channel.receive(Deadline(5))
        connect(metadata[0]["address"], b"nixl", "trainer 0", Deadline(5)).close()
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
    with side(1, 2) as engines:
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
        engines.check(1)


def refuse(ports: list[int]) -> None:
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.1)


def test_this_process_is_left_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    environment, hangup = dict(os.environ), caught(signal.SIGHUP)
    before = set(psutil.Process().net_connections("all"))
    with side(1, 2, extras={"topology": "chain"}) as engines:
        engines.check(1)
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


def test_a_cancelled_wait_ends_at_once_on_both_sides() -> None:
    with side(1, 1, timeout=20.0) as engines:
        engines.meet()
        receiver = call(lambda: engines.rollouts[0].receive_into(1, {}), "receiver")
        time.sleep(0.2)
        begin = time.monotonic()
        engines.rollouts[0].cancel()
        assert receiver.exception(5) is not None
        with pytest.raises(PeerLostError):
            engines.trainers[0].send_weights([("a", torch.zeros(1 << 22))], 1)
        assert time.monotonic() - begin < 3
        for engine in engines.all:
            engine.finalize()
        engines.check(2)


def test_what_was_read_while_its_owner_gave_up_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = mixed(1), mixed(2)
    with side(1, 1, verify="off", timeout=20.0) as engines:
        engines.trainers[0].bind(source)
        engines.rollouts[0].bind(target)
        engines.sync(1, source, [target])
        engines.meet()
        inner = NixlAgent.read

        def late(agent: NixlAgent, *arguments: Any) -> Any:
            if not engines.trainers[0]._cancelled.is_set():
                engines.trainers[0].cancel()
                engines.trainers[0].finalize()
                source["d"].zero_()  # the trainer goes on
            return inner(agent, *arguments)

        monkeypatch.setattr(NixlAgent, "read", late)
        sender = call(lambda: engines.trainers[0].send_weights(source.items(), 2), "sender")
        with pytest.raises(PeerLostError):
            engines.rollouts[0].receive_into(2, target)
        assert sender.exception(5) is not None


def test_a_lost_reader_is_dropped_and_the_others_served() -> None:
    source, targets = mixed(1), [mixed(2), mixed(3)]
    with side(1, 2) as engines:
        engines.meet()
        engines.rollouts[1].close()
        together(
            lambda: engines.trainers[0].send_weights(source.items(), 1),
            lambda: engines.rollouts[0].receive_into(1, targets[0]),
        )
        assert_same(source, targets[0])
        (outlet,) = engines.trainers[0]._meeting.outlets.values()
        assert isinstance(outlet, Outlet)
        assert len(outlet.lost) == 1
        assert "rollout 1 is gone" in outlet.lost[0]


def test_a_package_that_refuses_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_refusing").mkdir()
    (tmp_path / "nixl_refusing/__init__.py").write_text("raise ImportError('detected CUDA 99')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl_library, "_PACKAGES", ("nixl_refusing", "nixl_cu12"))
    nixl_library.library.cache_clear()
    assert nixl_library.library() is sys.modules["nixl_cu12._api"]
    monkeypatch.setattr(nixl_library, "_PACKAGES", ("nixl_refusing",))
    nixl_library.library.cache_clear()
    with pytest.raises(UnavailableError, match="detected CUDA 99") as refused:
        NixlEngine.available()
    assert refused.value.fix == "pip install 'rlctl[nixl]'"
    nixl_library.library.cache_clear()
