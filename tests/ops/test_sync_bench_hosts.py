"""The sync bench between two hosts: two separate invocations that share nothing but a loopback port and a token."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rlctl import __version__
from rlctl.cli.leaf import run
from rlctl.errors import RlctlError, UsageError
from rlctl.ops.sync_bench_choice import choose_backends
from rlctl.ops.sync_bench_link import Answer, Hello, Request, greet, parse_address
from rlctl.ops.sync_bench_remote import OtherHost, OtherHostGoneError
from rlctl.ops.sync_bench_serve import RolloutHost
from rlctl.ops.sync_bench_token import VARIABLE, derived, read_token, write_token
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import MemberLostError, PeerLostError

SMALL = ["--backend", "gloo", "--size", "2MiB", "--tensors", "5"]


@contextmanager
def invoked(tmp_path: Path, name: str, *arguments: str, token: str | None) -> Iterator[subprocess.Popen[str]]:
    """Start ``rlctl sync-bench`` in a process of its own; its stderr is in ``NAME.err``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLCTL_")}
    if token is not None:
        environment[VARIABLE] = token
    with (tmp_path / f"{name}.err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlctl", "sync-bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env=environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(tmp_path: Path, name: str, pattern: str, seconds: float = 30.0) -> str:
    """Return the first group of ``pattern`` in a process's stderr, once it is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = re.search(pattern, (tmp_path / f"{name}.err").read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"{name} did not say {pattern}: {(tmp_path / f'{name}.err').read_text()}")


@pytest.mark.timeout(150)
def test_two_hosts(tmp_path: Path) -> None:
    """Trainers here, rollout workers there; the token goes by the file that was made, and nobody prints it."""
    arguments = [
        *SMALL,
        "--rollouts",
        "2",
        "--iters",
        "2",
        "--warmup",
        "0",
        "-b",
        "1MiB",
        "-e",
        "2MiB",
        "-f",
        "3",
        "--json",
    ]
    with invoked(tmp_path, "listen", "--listen", "127.0.0.1:0", *arguments, token=None) as listening:
        address = said(tmp_path, "listen", r"--connect (\S+)")
        file = Path(said(tmp_path, "listen", r"--token-file (\S+)"))
        assert file.stat().st_mode & 0o077 == 0
        token = file.read_text().strip()
        with invoked(tmp_path, "stranger", "--connect", address, token=secrets.token_hex(16)) as stranger:
            assert stranger.wait(40) == 2
        assert "has another token" in (tmp_path / "stranger.err").read_text()
        with invoked(tmp_path, "peer", "--connect", address, "--token-file", str(file), token=None) as peer:
            printed, _ = listening.communicate(timeout=100)
            assert peer.wait(20) == 0
            assert "6 receipts" in peer.communicate()[0]  # 3 repetitions, 2 workers
    assert listening.returncode == 0
    document = json.loads(printed)
    assert [(row["bucket_size"], row["wrong"]) for row in document["rows"]] == [(1 << 20, 0)]
    assert document["other_host"]
    assert all(row["cpu_by_side"]["rollouts"] > 0 for row in document["rows"])
    assert not file.exists()
    texts = [printed, *(path.read_text() for path in tmp_path.iterdir())]
    assert "refused one that does not know the token" in texts[1] + texts[2] + texts[3]
    assert not any(token in text for text in texts)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_connecting_side_is_killed(tmp_path: Path) -> None:
    token = secrets.token_hex(16)
    arguments = ["--listen", "127.0.0.1:0", *SMALL, "--iters", "100000"]
    with invoked(tmp_path, "listen", *arguments, token=token) as listening:
        address = said(tmp_path, "listen", r"--connect (\S+)")
        with invoked(tmp_path, "peer", "--connect", address, token=token) as peer:
            said(tmp_path, "listen", r"(syncing)")
            peer.kill()
            assert listening.wait(20) == 1
    text = (tmp_path / "listen.err").read_text()
    assert "error: the other host has gone" in text
    assert "Traceback" not in text


def test_the_listening_side_goes_away() -> None:
    ours, theirs = (Channel(end, "the other side") for end in tcp_pair())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(RolloutHost(theirs, "token").serve)
        ours.send(msgspec.msgpack.encode(Request(1, "survey", {"backends": ["gloo", "hccl"]})), Deadline(10))
        answer = msgspec.msgpack.decode(ours.receive(Deadline(30)), type=Answer)
        assert [absent["backend"] for absent in answer.result["absent"]] == ["hccl"]
        ours.send(msgspec.msgpack.encode(Request(2, "dance")), Deadline(10))
        refused = msgspec.msgpack.decode(ours.receive(Deadline(10)), type=Answer)
        assert refused.error is not None
        ours.close()
        with pytest.raises(RlctlError, match="the listening host ended before all was measured"):
            done.result(10)


def test_the_connecting_side_goes_away() -> None:
    ours, theirs = (Channel(end, "the other side") for end in tcp_pair())
    other = OtherHost(ours, "token")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(other.ask, "survey", {}, Deadline(20))
        assert msgspec.msgpack.decode(theirs.receive(Deadline(10)), type=Request).kind == "survey"
        with pytest.raises(MemberLostError, match="no answer within"):
            other.ask("survey", {}, Deadline(0.1))
        other.check()
        theirs.close()
        with pytest.raises(PeerLostError, match="the other host has gone"):
            asked.result(10)
    with pytest.raises(MemberLostError, match="has gone"):
        other.ask("survey", {}, Deadline(20))
    with pytest.raises(OtherHostGoneError):
        other.check()
    other.close(done=True)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def test_nobody_comes_and_nobody_listens(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, secrets.token_hex(16))
    assert run("sync-bench", [*SMALL, "--listen", "127.0.0.1:0", "--wait", "300ms"]) == 1
    assert "no other host came" in capfd.readouterr().err
    listener = Listener("tcp:127.0.0.1:0", b"x")
    listener.close()
    address = listener.address.removeprefix("tcp:")
    assert run("sync-bench", ["--connect", address, "--wait", "300ms"]) == 1
    assert "does not listen" in capfd.readouterr().err


def test_another_version_is_refused_on_both_sides() -> None:
    mine, other = Channel.pair("this side", "the other host")
    other.send(msgspec.msgpack.encode(Hello("99.0")), Deadline(5))
    with pytest.raises(UsageError, match=rf"this is rlctl {re.escape(__version__)}, .* runs rlctl 99.0"):
        greet(mine)
    assert msgspec.msgpack.decode(other.receive(Deadline(5)), type=Hello).rlctl == __version__  # so it can say so, too


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_token(None) is None
    file = write_token()
    token = read_token(file)
    assert token is not None
    assert derived(token, "a") != derived(token, "b")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        read_token(file)
    file.unlink()
    with pytest.raises(UsageError, match="No such file"):
        read_token(file)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UsageError, match="no secret"):
        read_token(None)


def test_addresses() -> None:
    assert str(parse_address("5555", where="")) == str(parse_address(":5555", where="")) == "127.0.0.1:5555"
    assert str(parse_address("[::1]:80", where="")) == "[::1]:80"
    for odd in ("", "host", "host:http", "host:70000", "host:-1"):
        with pytest.raises(UsageError, match="is no address"):
            parse_address(odd, where="")


def test_only_what_crosses_hosts_is_measured_between_them() -> None:
    chosen, absent = choose_backends(["all"], across=True)
    assert "gloo" in chosen
    assert "through the memory of one host" in next(a.reason for a in absent if a.backend == "ipc")
    assert "--option file.folder" in next(a.remedy for a in absent if a.backend == "file")
    assert "file" in choose_backends(["all"], across=True, extras={"file": {"folder": "/mnt/x"}})[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--connect", "127.0.0.1:1"],  # without a token
        ["--listen", "nowhere", "--backend", "gloo"],
        ["--listen", "127.0.0.1:0", "--raw"],
        ["--listen", "127.0.0.1:0", "--wait", "0"],
        ["--connect", "127.0.0.1:1", "--listen", "127.0.0.1:2"],
        ["--connect", "127.0.0.1:1", "--size", "2GiB"],
        ["--token-file", "nowhere"],
    ],
)
def test_arguments(arguments: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert run("sync-bench", arguments) == 2
    assert capfd.readouterr().err
