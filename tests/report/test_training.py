"""The view of a training run: in a pipe, on a terminal, under CI."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.experience.events import Checkpointed, Signalled, Stage, StepEnded
from rlctl.report import Report
from rlctl.report.plots import can_plot, save_reward_plot
from rlctl.report.training import TrainingView, step_figures

SCRIPT = """
import logging, sys
from rlctl.experience.events import Checkpointed, Noted, StepEnded, Validated
from rlctl.report import Report
from rlctl.report.logs import logs_to
from rlctl.report.training import TrainingView
report = Report("train")
with logs_to(report), TrainingView(report) as view:
    view.begin({"run_dir": "runs/x", "steps": 60, "step": 0})
    view.on_event(Validated(step=0, accuracy=0.1, by_label={"2 ops": 0.05}))
    for step in range(1, 61):
        metrics = {"reward": step / 60, "seconds": 2.0, "seconds_generate": 1.0, "seconds_update_actor": 0.5}
        if step == 60:
            metrics["tasks/cycle/reward"] = 0.75
        view.on_event(StepEnded(step=step, version=step, metrics=metrics))
        if step == 30:
            view.on_event(Checkpointed(step=30, name="step_30", seconds=0.1))
            view.on_event(Noted(message="update skipped"))
            logging.getLogger("rlctl").warning("a record")
view.summary(
    {
        "run_dir": "runs/x", "steps": 60, "seconds": 5.0, "samples_per_s": 8.0, "tokens_per_s": None,
        "reward": {"first": 0.1, "last": 0.9, "curve": [i / 60 for i in range(60)]},
        "tasks": {"cycle": {"prompts": 48, "reward": {"first": 0.25, "last": 0.75}}},
        "eval": {"before": 0.1, "after": 0.75, "by_label": {"2 ops": {"before": 0.05, "after": None}}},
        "mode": "separate_async", "staleness": {"mean": 1.234, "max": 4.0, "tokens": 1.0},
        "bubble": {"trainer": 0.25, "rollout": None},
        "sync": {"count": 61, "seconds": 2.0, "stall_seconds": 0.5},
    },
    ["rlctl replay runs/x"],
)
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
    assert steps[0] == "step 1/60  reward 0.017  time generate 67% update_actor 33%  eta 1m58s"
    assert steps[-1].startswith("step 60/60  reward 1.000  cycle 0.750  time")
    assert lines[0] == "run folder runs/x: 60 steps"
    assert lines[1] == "held-out accuracy after step 0: 0.100, 2 ops 0.050"
    assert "warning: update skipped" in lines
    assert not [line for line in lines if "checkpoint" in line]
    assert re.fullmatch(r"sync: 100% \(5 of 5\), \d+ ms", lines[-1])
    out = done.stdout.decode()
    assert "60 steps in 5.0 s: reward 0.100 -> 0.900, 8 samples/s, - tokens/s" in out
    assert (
        "separate_async: staleness 1.23 (at most 4), idle: trainer 25%, rollout -, 61 syncs in 2.0 s "
        "(rollouts stood still for 500 ms)\n"
    ) in out
    assert "all                 0.100  0.750" in out
    assert "2 ops               0.050      -" in out
    assert "task   prompts  reward first   last\ncycle       48         0.250  0.750\n" in out
    assert out.endswith("run folder: runs/x\nnext:\n  rlctl replay runs/x\nFalse\n")


def test_a_terminal_gets_a_panel_with_messages_above() -> None:
    shown = on_terminal()
    assert "\x1b[" in shown
    assert "course" in shown
    assert "60/60" in shown
    assert shown.count("update skipped") == 1
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


def view_on(verbosity: int = 0) -> tuple[TrainingView, io.StringIO]:
    err = io.StringIO()
    return TrainingView(Report("train", verbosity=verbosity, color="never", out=io.StringIO(), err=err)), err


def test_what_is_not_known_is_left_out() -> None:
    assert step_figures({}) == []
    assert step_figures({"reward": 0.5, "prompts": 3.0, "seconds_x": 0.0}) == [("reward", "0.500")]
    assert step_figures({"seconds_a": 99.5, "seconds_b": 0.5}) == [("time", "a 100%")]


def test_every_step_with_verbose_and_none_with_quiet() -> None:
    for verbosity, lines in ((1, 31), (-1, 0)):
        view, err = view_on(verbosity)
        with view:
            view.begin({"run_dir": "r", "steps": 1000, "step": 0})
            for step in range(1, 31):
                view.on_event(StepEnded(step=step, version=step, metrics={}))
        assert len(err.getvalue().splitlines()) == lines


def test_where_the_run_ended_is_said_when_it_fails() -> None:
    view, err = view_on()
    with pytest.raises(ValueError, match="lost"), view:
        view.begin({"run_dir": "r", "steps": 100, "step": 40})
        view.on_event(StepEnded(step=41, version=41, metrics={"seconds": 1.0}))
        view.on_event(StepEnded(step=42, version=42, metrics={"seconds": 3.0}))
        raise ValueError("lost")
    assert err.getvalue().splitlines() == [
        "run folder r: 100 steps, going on from step 40",
        "step 41/100  eta 59.0 s",
        "step 42/100  eta 1m56s",
    ]


def test_signals_and_checkpoints_are_told() -> None:
    view, err = view_on(1)
    view.on_event(Signalled(name="SIGTERM", step=3))
    view.on_event(Checkpointed(step=3, name="step_3", seconds=0.25))
    view.on_event(Stage(name="generate", step=3, seconds=0.1))
    assert err.getvalue().splitlines() == [
        "SIGTERM: saving a checkpoint at the end of this step; once more to stop at once",
        "checkpoint step_3 saved in 250 ms",
    ]


def test_reward_plot(tmp_path: Path) -> None:
    if not can_plot():
        pytest.skip("matplotlib is not installed")
    save_reward_plot(tmp_path / "reward.png", [i / 60 for i in range(60)], title="t")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["reward.png"]
