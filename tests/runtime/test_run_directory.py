"""One owner, no half files, no foreign folder cleared; signals ask once and end twice."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from rlctl.errors import UsageError
from rlctl.runtime.run_directory import RunDirectory, new_run_path
from rlctl.runtime.signals import StopSignal


def run_in(path, **options) -> RunDirectory:
    directory = RunDirectory.open(path, resume=False, **options)
    directory.write_document("config.json", {"run": {"seed": 1}})
    return directory


def test_a_folder_in_use_is_refused(tmp_path):
    first = run_in(tmp_path / "r")
    with pytest.raises(UsageError, match="in use"):
        RunDirectory.open(tmp_path / "r", resume=True)
    first.close()
    second = RunDirectory.open(tmp_path / "r", resume=True)
    assert second.attempt == 1
    second.close()


def test_a_folder_with_content_needs_resume_or_overwrite(tmp_path):
    run_in(tmp_path / "r").close()
    with pytest.raises(UsageError, match="not empty") as caught:
        RunDirectory.open(tmp_path / "r", resume=False)
    assert "--resume" in str(caught.value) and "--overwrite" in str(caught.value)
    fresh = RunDirectory.open(tmp_path / "r", resume=False, overwrite=True)
    assert fresh.attempt == 0 and not (tmp_path / "r" / "config.json").exists()
    fresh.close()


def test_overwrite_never_clears_what_is_not_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory.open(tmp_path, resume=False, overwrite=True)
    run_in(tmp_path / "r").close()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt"):
        RunDirectory.open(tmp_path / "r", resume=False, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError):
        RunDirectory.open(tmp_path, **{"resume": False, **options})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_kill_at_the_start_left_can_be_gone_on_with(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / ".config.json.1234.tmp").write_text("{")
    RunDirectory.open(tmp_path, resume=True).close()


def test_a_fresh_folder_is_never_shared(tmp_path):
    path = new_run_path(tmp_path / "runs", "n")
    both = [RunDirectory.open(path, resume=False, fresh=True) for _ in range(2)]
    assert [d.path.name for d in both] == [path.name, f"{path.name}-2"]
    for directory in both:
        directory.discard()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_or_an_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.open(tmp_path / "file", resume=False)
    with pytest.raises(Exception, match="cannot be written") as caught:
        RunDirectory.open(tmp_path / "file" / "below", resume=False)
    assert "--run-dir" in str(caught.value)


def test_metrics_of_steps_done_again_have_one_line(tmp_path):
    directory = run_in(tmp_path / "r")
    directory.start_metrics(from_step=0)
    for step in range(1, 6):
        directory.add_metrics({"step": step, "reward": 0.0})
    directory.close()
    with (tmp_path / "r" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "rew')
    again = RunDirectory.open(tmp_path / "r", resume=True)
    again.start_metrics(from_step=3)
    again.add_metrics({"step": 4, "reward": 1.0})
    assert [(m["step"], m["reward"]) for m in again.read_metrics()] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]
    again.close()


def test_each_attempt_has_its_log_and_latest_points_to_it(tmp_path):
    for attempt in range(2):
        directory = RunDirectory.open(tmp_path / "r", resume=attempt > 0)
        directory.start_log()
        logging.getLogger("test").warning("attempt %d speaks", attempt)
        directory.close()
    assert "attempt 1 speaks" in (tmp_path / "r" / "logs" / "latest").read_text()
    assert "attempt 0 speaks" in (tmp_path / "r" / "logs" / "attempt_0.log").read_text()


def test_documents_are_replaced_whole(tmp_path):
    directory = run_in(tmp_path / "r")
    directory.write_document("result.json", {"a": 1})
    directory.write_document("result.json", {"a": float("nan"), "b": [1]})
    assert json.loads((tmp_path / "r" / "result.json").read_text())["b"] == [1]
    assert not list((tmp_path / "r").glob(".*.tmp"))
    assert directory.read_document("absent.json") is None
    directory.close()


def test_new_run_paths_do_not_collide(tmp_path):
    first = new_run_path(tmp_path, "cycle")
    first.mkdir()
    assert new_run_path(tmp_path, "cycle") != first


def test_the_first_signal_is_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_second_signal_ends_the_process_at_once():
    program = (
        "import time\nfrom rlctl.runtime.signals import StopSignal\n"
        "with StopSignal() as stop:\n print('ready', flush=True)\n"
        " while stop.requested is None: time.sleep(0.01)\n print('asked', flush=True)\n time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"asked\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert time.monotonic() - begin < 5
