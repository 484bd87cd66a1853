"""One trial of a sync with a fault in it, and what must hold whatever the fault."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlctl.sync.deadline import Deadline
from rlctl.sync.report import SyncError, SyncReport
from rlctl.sync.states import Ending
from tests.sync.squad import Managed


@dataclass
class Trial:
    report: SyncReport
    error: SyncError | None
    seconds: float


def strike(managed: Managed, side: str, place: int, fault: Mapping[str, Any], version: int) -> Trial:
    """Sync ``version`` with a fault (``faults.Fault``, or ``stop``: SIGSTOP after ``seconds``), and check what holds.

    The end comes by the deadline and a second, it is a legal one, and every replica that serves holds exactly the
    version it says.
    """
    before = dict(managed.manager.versions)
    members = managed.squad.trainers if side == "sender" else managed.squad.rollouts
    managed.load_version(version)
    timer = None
    if fault["kind"] == "stop":
        pid = members.members[place].pid
        timer = threading.Timer(fault["seconds"], lambda: os.kill(pid, signal.SIGSTOP))
        timer.start()
    else:
        members.members[place].ask("inject", {"fault": dict(fault)}, Deadline(60))
    begin, error = time.monotonic(), None
    try:
        report = managed.sync(version)
    except SyncError as caught:
        assert caught.report is not None
        report, error = caught.report, caught
    seconds = time.monotonic() - begin
    if timer is not None:  # a sync that was over before it struck is not to spoil the next
        timer.cancel()
        timer.join()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert seconds < managed.policy.timeout + 1, f"{fault}: {seconds:.2f} s"
    after = managed.manager.versions
    serving = {name: v for name, v in after.items() if v is not None}
    assert set(report.fenced) == set(after) - set(serving), fault
    assert set(serving.values()) in ({version}, set(before.values()), set()), (fault, before, after)
    if managed.policy.commit == "staged" and report.ending is not Ending.COMMITTED:
        dead = ("died", "killed", "no answer")
        lost = {n for n, reason in report.fenced.items() if any(word in reason for word in dead)}
        rest = {n: v for n, v in after.items() if n not in lost}
        if report.committed:  # all had the whole of it, and one was lost in the swap
            assert all("commit: " in reason for reason in report.fenced.values()), (fault, report)
            assert set(rest.values()) == {version}, (fault, report)
        else:
            assert rest == {n: v for n, v in before.items() if n not in lost}, (fault, report)
    if report.ending is not Ending.COMMITTED:
        assert report.fenced or error is not None
        text = f"{error or ''} {' '.join(report.fenced.values())}"
        assert any(f"{phase}: " in text for phase in ("prepare", "connect", "transfer", "commit")), text
        assert "trainer" in text or "rollout" in text, text
    managed.assert_whole()
    return Trial(report, error, seconds)


def recover(managed: Managed, version: int) -> None:
    """The next sync brings everybody to ``version``, whatever happened before."""
    managed.load_version(version)
    report = managed.sync(version)
    assert report.ending is Ending.COMMITTED, report
    managed.assert_whole()
