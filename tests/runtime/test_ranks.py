"""The supervisor of trainer ranks: who is blamed, in what time, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlctl.errors import UsageError
from rlctl.model.memory_settings import Memory
from rlctl.runtime.ranks.messages import RankSetup, TensorHead, tensor_from
from rlctl.runtime.ranks.supervisor import RankError, TrainerRanks
from rlctl.schema.training import OptimizerConfig
from tests.waiting import gone

pytestmark = pytest.mark.new_interpreters
TARGET = "tests.runtime.rank_targets:main"


def setups(world: int, timeout: float) -> list[RankSetup]:
    return [
        RankSetup(
            rank=rank, world=world, tp=1, store="", timeout=timeout, device="cpu", threads=1, source="",
            trust_remote_code=False, optimizer=OptimizerConfig(), dtype="float32", micro_batch_tokens=1,
            total_updates=1, memory=Memory(),
        )
        for rank in range(world)
    ]  # fmt: skip


@pytest.fixture
def ranks(tmp_path) -> Iterator[TrainerRanks]:
    started = TrainerRanks(setups(3, 1.0), logs=tmp_path, target=TARGET)
    yield started
    started.close()


def blamed(ranks: TrainerRanks, operation: str, match: str, who: int = 1) -> float:
    begin = time.monotonic()
    with pytest.raises(RankError, match=match):
        ranks.call(operation, who=who)
    seconds = time.monotonic() - begin
    assert all(gone(pid, 0.0) or not Path(f"/proc/{pid}").exists() for pid in ranks.pids)
    with pytest.raises(RankError, match="have ended"):
        ranks.call("echo")
    return seconds


def test_rank_0_answers_and_tensors_are_handed_out(ranks):
    assert ranks.call("echo", number=3) == [0, {"number": 3}]
    found = {}
    for report in ranks.stream("stream"):
        if report.kind == "tensor":
            head = msgspec.convert(report.result, TensorHead)
            found[head.name] = bytes(tensor_from(head, lambda: ranks.piece("stream")).numpy())
    assert found == {"a": b"xyz", "b": b"xyz"}
    assert ranks.call("echo") == [0, {}]


def test_one_that_dies_is_named_with_its_end_and_its_last_lines(ranks):
    seconds = blamed(ranks, "die", r"trainer rank 1 of 3 died in die: exit code 3\n    rank 1 is up")
    assert seconds < 1.0 or os.getloadavg()[0] > 2


def test_one_that_is_killed_is_named(ranks):
    os.kill(ranks.pids[2], signal.SIGKILL)
    assert gone(ranks.pids[2])
    blamed(ranks, "echo", "trainer rank 2 of 3 died in echo: SIGKILL", who=7)


def test_one_that_fails_is_named_not_those_that_wait_for_it(ranks):
    blamed(ranks, "fail", "trainer rank 2 of 3 failed in fail: ZeroDivisionError: by zero", who=2)


def test_what_a_user_can_mend_comes_as_it_is(ranks):
    with pytest.raises(UsageError, match="a wrong value") as caught:
        ranks.call("refuse", who=1)
    assert caught.value.where == "some.key"
    assert all(gone(pid) for pid in ranks.pids)


def test_one_that_stalls_is_named_within_a_second_of_the_deadline(ranks):
    seconds = blamed(ranks, "sleep", r"trainer rank 1 of 3 stalled in sleep: no answer for 1 s(.|\n)*rank_targets.py")
    assert 1.0 < seconds < (2.0 if os.getloadavg()[0] < 2 else 5.0)


def test_one_that_is_stopped_is_named(ranks):
    os.kill(ranks.pids[0], signal.SIGSTOP)
    blamed(ranks, "echo", r"trainer rank 0 of 3 stalled in echo(.|\n)*does not say where", who=7)


def test_a_stream_that_is_left_ends_the_ranks(ranks):
    stream = ranks.stream("stream")
    next(stream)
    stream.close()
    assert all(gone(pid) for pid in ranks.pids)


def test_ctrl_c_in_the_middle_ends_the_ranks(ranks):
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("sleep", who=1)
    assert all(gone(pid) for pid in ranks.pids)


def test_ranks_do_not_outlive_a_driver_that_is_killed(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tests.runtime.test_ranks import TARGET, TrainerRanks, setups\n"
        "ranks = TrainerRanks(setups(2, 5.0), logs=Path(sys.argv[1]), target=TARGET)\n"
        "print(*ranks.pids, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        driver.kill()
        driver.wait(10)
    assert all(gone(pid) for pid in pids)
