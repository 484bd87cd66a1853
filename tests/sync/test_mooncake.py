"""The Transfer Engine's way: what is read from where to where, who gets in, what is missing on a machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.sync.backends.mooncake import MooncakeEngine
from rlctl.sync.backends.mooncake_transport import Piece, Transport, ranges_of
from rlctl.sync.calls import call
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import PeerLostError, TransferError
from tests.sync.mooncake_pair import Pair, connect, sync, weights

Weights = dict[str, torch.Tensor]


@pytest.mark.mooncake
def test_large_pieces_go_from_the_weights_right_into_the_engines(
    library: Transport, mooncakes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = weights(1)
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    pieces: list[Piece] = []
    read = library.read

    def noting(segment: str, batch: Sequence[Piece]) -> bool:
        pieces.extend(batch)
        return read(segment, batch)

    monkeypatch.setattr(library, "read", noting)
    mooncakes[0].bind(source)
    for version in (1, 2):
        source["tiny"] += 1
        source["large"] += 1
        pieces.clear()
        sync(mooncakes, source, targets, version)
        assert all(torch.equal(targets[n], t) for n, t in source.items())
        for name in ("large", "medium", "tied"):
            to, out_of = targets[name].data_ptr(), source[name].data_ptr()
            mine = [p for p in pieces if to <= p.to < to + targets[name].nbytes]
            assert sum(p.nbytes for p in mine) == targets[name].nbytes, name
            assert all(p.out_of - out_of == p.to - to for p in mine), name
        assert sum(p.nbytes for p in pieces if p.nbytes < 128 << 10) < 20_000


@pytest.mark.mooncake
def test_memory_is_registered_once_and_let_go(
    library: Transport, mooncakes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, worker = mooncakes
    first, second = weights(1), weights(2)
    targets = {name: torch.zeros_like(t) for name, t in first.items()}
    calls: list[str] = []
    register = library.register
    monkeypatch.setattr(library, "register", lambda ranges: calls.append("register") or register(ranges))
    trainer.bind(first)
    worker.bind(targets)
    for version in range(3):
        sync(mooncakes, first, targets, version)
    assert len(calls) == 2  # the trainer's buckets, the trainer's weights; nothing of the worker's
    assert library.knows(first["large"].data_ptr(), first["large"].nbytes)
    assert not library.knows(first["large"].data_ptr() - 1, 2)
    assert not library.knows(targets["large"].data_ptr(), 1)
    trainer.bind(second)
    assert not library.knows(first["large"].data_ptr(), 1)
    sync(mooncakes, second, targets, 3)
    assert all(torch.equal(targets[n], t) for n, t in second.items())
    trainer.close()
    assert not library.knows(second["large"].data_ptr(), 1)


@pytest.mark.mooncake
def test_streams_memory_that_is_not_bound_goes_through_buckets(mooncakes: Pair) -> None:
    source = weights(3)
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    sync(mooncakes, {name: t.clone() for name, t in source.items()}, targets)
    assert all(torch.equal(targets[n], t) for n, t in source.items())


@pytest.mark.mooncake
def test_many_tensors_in_one_bucket(mooncakes: Pair) -> None:
    source = {f"layer.{i}": torch.full((i % 7,), i, dtype=torch.int32) for i in range(4000)}
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    sync(mooncakes, source, targets)
    assert all(torch.equal(targets[n], t) for n, t in source.items())


@pytest.mark.mooncake
def test_strangers_at_the_librarys_ports_are_sent_away(library: Transport) -> None:
    library.gate.open()
    with socket.create_connection(library.address, timeout=5) as stranger:
        library.gate.shut()
        library.keep_only([])
        assert stranger.recv(1) == b""
    with pytest.raises(TimeoutError):
        socket.create_connection(library.address, timeout=0.2)


@pytest.mark.mooncake
def test_worker_without_the_token_is_refused(library: Transport, mooncakes: Pair) -> None:
    trainer, _ = mooncakes
    stranger = MooncakeEngine(Member("rollout", 0, 1), EngineOptions(bucket_size=4096, timeout=2.0, token="a guess"))  # noqa: S106
    metadata = [trainer.prepare(1.0), stranger.prepare(1.0)]
    kwargs = MooncakeEngine.build_topology(1, 1, metadata)
    meeting = call(lambda: trainer.init_process_group(**kwargs[0]), "connect")
    with pytest.raises(PeerLostError, match="refused the connection"):
        stranger.init_process_group(**kwargs[1])
    with pytest.raises(TransferError, match="waiting for a rollout worker"):
        meeting.result(timeout=5)
    stranger.close()


@pytest.mark.mooncake
def test_no_read_is_under_way_when_a_worker_has_given_up(
    library: Transport, mooncakes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, worker = mooncakes
    source = weights(1)
    targets = {name: torch.zeros_like(t) for name, t in source.items()}
    reading, read = threading.Event(), library.read
    active: list[bool] = []

    def slow(segment: str, batch: Sequence[Piece]) -> bool:
        if len(batch) == 1 and batch[0].nbytes == 1:
            return read(segment, batch)
        active.append(True)
        reading.set()
        time.sleep(0.4)
        came = read(segment, batch)
        active.pop()
        return came

    monkeypatch.setattr(library, "read", slow)
    connect(trainer, worker)
    sending = call(lambda: trainer.send_weights(source.items(), 1), "send")
    receiving = call(lambda: worker.receive_into(1, targets), "receive")
    assert reading.wait(5)
    worker.cancel()
    with pytest.raises(TransferError):
        receiving.result(timeout=5)
    assert active == []
    before = {name: t.clone() for name, t in targets.items()}
    with pytest.raises(PeerLostError, match="no receiver is left"):
        sending.result(timeout=5)
    for engine in mooncakes:
        engine.finalize()
    assert all(torch.equal(targets[n], t) for n, t in before.items())
    monkeypatch.undo()
    sync(mooncakes, source, targets, 2)
    assert all(torch.equal(targets[n], t) for n, t in source.items())


def test_ranges_have_no_overlaps_and_no_gaps_inside() -> None:
    whole = torch.zeros(1000, dtype=torch.uint8)
    other = torch.zeros(10)
    found = ranges_of([whole[:100], whole[50:], other, other.view(2, 5), torch.empty(0)])
    assert found == sorted([(whole.data_ptr(), 1000), (other.data_ptr(), 40)])


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'udp' is no protocol of mooncake"):
        MooncakeEngine(Member("trainer", 0, 1), EngineOptions(extras={"protocol": "udp"}))


@pytest.mark.mooncake
@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine may have RDMA")
def test_rdma_without_a_device_is_not_silently_tcp(library: Transport) -> None:
    engine = MooncakeEngine(Member("rollout", 0, 1), EngineOptions(bucket_size=4096, extras={"protocol": "rdma"}))
    with pytest.raises(UnavailableError, match="no RDMA device"):
        engine.prepare()


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    code = f"""
import importlib, pathlib, sys
sys.path[:0] = [{str(tmp_path)!r}, "."]
from rlctl.errors import UnavailableError
from rlctl.sync.backends.mooncake import MooncakeEngine
for content in (None, b"of another machine"):
    if content:
        pathlib.Path({str(package)!r}, "engine.so").write_bytes(content)
        importlib.invalidate_caches()
    try:
        MooncakeEngine.available()
    except UnavailableError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    told = ran.stdout.splitlines()
    assert told[:2] == ["the package mooncake is not installed", "  pip install 'rlctl[mooncake]'"]
    assert told[2].startswith("Mooncake cannot be loaded: ")
    assert told[3] == "  apt-get install libibverbs1 librdmacm1 libnuma1"
