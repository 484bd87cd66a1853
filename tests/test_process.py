"""Child processes: messages, deadlines, deaths, and no orphans."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlctl.process import Channel, Child, ChildDied, Deadline, run_token, start
from tests.waiting import gone

pytestmark = pytest.mark.new_interpreters
ECHO = "tests.process_targets:echo"


@pytest.fixture
def child() -> Iterator[Child]:
    with start(ECHO, name="echo") as running:
        yield running


def test_messages_survive_the_channel_exactly(child: Child) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    messages = [
        None,
        0,
        -1.5,
        "é\x00",
        b"\xff" * 300_000,
        {"a": [1, {"b": b""}]},
        rng.randbytes(rng.randrange(1 << 18)),
    ]
    for message in messages:
        assert child.request(message, 10.0) == message


def test_a_message_is_checked_against_the_expected_type(child: Child) -> None:
    with pytest.raises(msgspec.ValidationError):
        child.request("text", 10.0, int)


def test_no_answer_in_time_is_a_timeout_and_the_child_can_be_killed(child: Child) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        child.request("sleep", 0.2)
    assert child.alive()
    child.kill()
    assert time.monotonic() - begin < 5
    assert not child.alive()
    assert gone(child.pid)


@pytest.mark.parametrize(("message", "reason"), [("crash", "SIGSEGV"), ("leave", "exit code 3")])
def test_a_death_is_told_with_its_reason(child: Child, message: str, reason: str) -> None:
    with pytest.raises(ChildDied, match=f"'echo' died: {reason}"):
        child.request(message, 10.0)
    assert not child.alive()


def test_sigterm_that_is_ignored_is_followed_by_sigkill(child: Child) -> None:
    child.request("ignore sigterm", 10.0)
    child.channel.send("sleep", 10.0)
    begin = time.monotonic()
    child.kill(grace=0.3)
    assert 0.25 < time.monotonic() - begin < 5
    assert gone(child.pid)


def test_a_kill_reaches_the_childs_own_children(child: Child) -> None:
    grandchild = child.request("grandchild", 10.0, int)
    child.kill()
    assert gone(grandchild)


def test_closing_reaches_the_childs_own_children_and_ends_it_without_force(child: Child) -> None:
    grandchild = child.request("grandchild", 10.0, int)
    child.close(grace=5.0)
    assert child.ending() == "exit code 0"
    assert gone(grandchild)


def test_output_goes_to_the_file_and_not_to_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with start(ECHO, name="echo", output=tmp_path / "log") as child:
        child.request("print", 10.0)
    assert (tmp_path / "log").read_text().splitlines() == ["on stdout", "on stderr"]
    assert capfd.readouterr() == ("", "")


def test_children_share_the_token_and_have_a_session_of_their_own(child: Child) -> None:
    assert child.request("token", 10.0) == run_token()
    pid, session = child.request("ids", 10.0)
    assert pid == session == child.pid


def test_a_target_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ChildDied, match="'lost' died: ModuleNotFoundError: No module named 'no_such'"):
        start("no_such.module:function", name="lost")
    with pytest.raises(ChildDied, match="died: AttributeError"):
        start("tests.process_targets:nothing", name="lost")


def test_a_start_over_its_deadline_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "slow_import_of_ours.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TimeoutError):
        start("slow_import_of_ours:main", name="slow", timeout=2.0)
    assert gone(int(pid.read_text()))


def test_a_child_outlives_the_thread_that_started_it() -> None:
    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(start(ECHO, name="echo")))
    thread.start()
    thread.join(60)
    with started[0] as child:
        time.sleep(0.2)
        assert child.request("still there", 10.0) == "still there"


@pytest.mark.parametrize("busy", [False, True])
def test_no_orphan_after_the_parent_is_killed(busy: bool) -> None:
    code = (
        "import sys, time\nfrom rlctl.process import start\n"
        f"child = start({ECHO!r}, name='echo')\nprint(child.pid, flush=True)\n"
        f"child.request('sleep' if {busy} else 'idle', 60.0)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    assert gone(child)
    parent.wait(10)
    parent.stdout.close()


def test_the_end_of_the_interpreter_ends_children_that_nobody_closed() -> None:
    code = f"from rlctl.process import start\nchild = start({ECHO!r}, name='echo')\nprint(child.pid, flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert gone(int(done.stdout))
    assert done.stderr == ""


def test_half_a_frame_is_kept_for_the_next_wait() -> None:
    import socket

    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    body = msgspec.msgpack.encode({"n": 7})
    frame = len(body).to_bytes(4, "little") + body
    theirs.sendall(frame[:6])
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    theirs.sendall(frame[6:] + frame)
    assert channel.receive(1.0) == {"n": 7}
    assert channel.receive(1.0) == {"n": 7}
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(EOFError, match="not a message of ours"):
        channel.receive(1.0)
    theirs.close()
    channel.close()


def test_a_deadline_is_shared_by_several_waits() -> None:
    deadline = Deadline(0.1)
    assert 0 < deadline.remaining() <= 0.1
    time.sleep(0.12)
    with pytest.raises(TimeoutError):
        deadline.remaining()
