"""The view of a training run: in a pipe, on a terminal, under CI."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.report import Report
from rlctl.report.plots import can_plot, save_reward_plot
from rlctl.report.training import TrainingView, describe_step

SCRIPT = """
import logging, sys
from rlctl.report import Report
from rlctl.report.logs import set_up_logs
from rlctl.report.training import TrainingView
report = Report("train")
set_up_logs(report)
with TrainingView(report) as view:
    for step in range(1, 61):
        view.step({"step": step, "steps": 60, "reward": step / 60, "time": {"rollout": 2.0, "train": 1.0}, "eta_s": 1})
        if step == 30:
            view.event("checkpoint at step 30")
            logging.getLogger("rlctl").warning("a record")
view.summary({"steps": 60, "seconds": 5.0, "reward": {"first": 0.1, "last": 0.9}, "samples_per_s": 8.0,
              "tokens_per_s": 100.0, "run_dir": "runs/x", "next": ["rlctl replay runs/x"],
              "eval": {"before": {"overall": 0.1, "groups": {"2 ops": 0.05}}, "after": {"overall": 0.75}}})
with report.progress("sync", 5) as progress:
    progress.advance(5)
print("rich" in sys.modules)
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR", "TERM")}
    return kept | {"TERM": "xterm", "PYTHONUTF8": "1"} | extra


def on_terminal(**extra: str) -> str:
    """Run the script with stderr and stdout on a pseudo-terminal and return what a terminal would get."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=follower, stderr=follower, env=environment(**extra)
    )
    os.close(follower)
    got = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        got += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return got.decode()


@pytest.mark.parametrize("extra", [{}, {"CI": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_pipe_gets_whole_plain_lines(extra: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, env=environment(**extra), timeout=60, check=True
    )
    for stream in (done.stdout, done.stderr):
        assert b"\r" not in stream
        assert b"\x1b" not in stream
        assert stream.endswith(b"\n")
    lines = done.stderr.decode().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 10 <= len(steps) <= 12
    assert steps[0] == "step 1/60  reward 0.017  time rollout 67% train 33%  eta 1.0 s"
    assert steps[-1].startswith("step 60/60")
    assert "checkpoint at step 30" in lines
    assert lines[-1] == "sync: 100% (5 of 5), 0 ms"
    out = done.stdout.decode()
    assert "60 steps in 5.0 s: reward 0.100 -> 0.900" in out
    assert "overall             0.100  0.750" in out
    assert "2 ops               0.050      -" in out
    assert out.endswith("run folder: runs/x\nnext:\n  rlctl replay runs/x\nFalse\n")


def test_a_terminal_gets_a_panel_with_messages_above() -> None:
    shown = on_terminal()
    assert "\x1b[" in shown
    assert "course" in shown
    assert "60/60" in shown
    assert shown.count("checkpoint at step 30") == 1
    assert shown.count("a record") == 1
    assert shown.index("\x1b[?25l") < shown.index("\x1b[?25h")
    assert shown.rstrip().endswith("True")


@pytest.mark.parametrize("extra", [{"CI": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_must_not_move_gets_lines(extra: dict[str, str]) -> None:
    shown = on_terminal(NO_COLOR="1", **extra)
    assert "\x1b" not in shown
    assert "\r" not in shown.replace("\r\n", "\n")
    assert shown.rstrip().endswith("False")


def test_no_color_keeps_the_panel_but_no_colors() -> None:
    shown = on_terminal(NO_COLOR="1")
    assert "course" in shown
    assert not [code for code in ("\x1b[3", "\x1b[9", "\x1b[38", "\x1b[48") if code in shown]


def test_what_is_not_known_is_left_out() -> None:
    assert describe_step({"step": 1, "steps": 2}) == "step 1/2"
    assert describe_step({"step": 1, "steps": 2, "reward": 0.5, "length": None}) == "step 1/2  reward 0.500"


def test_every_step_with_verbose_and_none_with_quiet() -> None:
    for verbosity, lines in ((1, 30), (-1, 0)):
        err = io.StringIO()
        with TrainingView(Report("train", verbosity=verbosity, color="never", out=io.StringIO(), err=err)) as view:
            for step in range(1, 31):
                view.step({"step": step, "steps": 1000})
        assert len(err.getvalue().splitlines()) == lines


def test_where_the_run_ended_is_said_when_it_fails() -> None:
    err = io.StringIO()
    view = TrainingView(Report("train", color="never", out=io.StringIO(), err=err))
    with pytest.raises(ValueError, match="lost"), view:
        view.step({"step": 1, "steps": 100})
        view.step({"step": 2, "steps": 100})
        raise ValueError("lost")
    assert err.getvalue() == "step 1/100\nstep 2/100\n"


def test_reward_plot(tmp_path: Path) -> None:
    if not can_plot():
        pytest.skip("matplotlib is not installed")
    save_reward_plot(tmp_path / "reward.png", [i / 60 for i in range(60)], title="t")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["reward.png"]
