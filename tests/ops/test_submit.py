"""``rlctl train --submit``: the command of the job, where it goes, and what is said when nobody is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlctl.cli import main
from rlctl.errors import UsageError
from rlctl.ops.submit import entrypoint, job_server

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def train(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["train", *words])
    out, err = capfd.readouterr()
    return code, out, err


def test_the_address_is_the_flags_or_the_environments():
    assert job_server("http://head:8265/", {}) == "http://head:8265"
    assert job_server("head:8265", {"RAY_ADDRESS": "http://other:8265"}) == "http://head:8265"
    both = {"RAY_ADDRESS": "http://other:8265", "RAY_API_SERVER_ADDRESS": "https://api:443"}
    assert job_server(None, both) == "https://api:443"
    with pytest.raises(UsageError, match="wants the address"):
        job_server(None, {"RAY_ADDRESS": ""})
    with pytest.raises(UsageError, match="not the address of a job server") as caught:
        job_server(None, {"RAY_ADDRESS": "ray://head:10001"})
    assert caught.value.where == "RAY_ADDRESS"


def test_the_command_is_quoted_for_a_shell():
    command = entrypoint(["--profile", "my profile.yaml", "task.name=$x"], Path("/shared/my runs"))
    assert command == "cd '/shared/my runs' && exec rlctl train --profile 'my profile.yaml' 'task.name=$x'"


def test_without_ray_it_says_what_to_install(capfd, monkeypatch):
    monkeypatch.setattr("rlctl.runtime.launch.ray_cluster.find_spec", lambda name: None)
    code, out, err = train(capfd, "--submit", "--ray-address", NOBODY)
    assert (code, out) == (3, "")
    assert "pip install 'rlctl[ray]'" in err


def test_a_run_is_checked_before_it_is_submitted(capfd):
    code, _, err = train(capfd, "--submit", "--ray-address", NOBODY, "run.stepz=3")
    assert code == 2
    assert "run.steps" in err
    code, _, err = train(capfd, "--submit", "--dry-run")
    assert code == 2
    assert "exclude each other" in err


def test_an_address_implies_ray(capfd):
    code, out, _ = train(capfd, "--ray-address", "10.0.0.1:6379", "--show-config", "--json")
    assert code == 0
    cluster = json.loads(out)["config"]["cluster"]
    assert (cluster["launcher"], cluster["ray_address"]) == ("ray", "10.0.0.1:6379")


def test_a_run_of_one_process_has_no_use_for_ray(capfd):
    code, out, err = train(capfd, "--ray-address", "10.0.0.1:6379")
    assert (code, out) == (2, "")
    assert "Ray has nothing to place" in err


@pytest.mark.ray
def test_nobody_there_is_said_with_what_to_do(capfd):
    code, out, err = train(capfd, "--submit", "--ray-address", NOBODY)
    assert (code, out) == (1, "")
    assert "no Ray job server answers: Connection refused" in err
    assert "--dashboard-host" in err


class Server(BaseHTTPRequestHandler):
    """The part of Ray's job API that a submission uses."""

    jobs: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        import ray

        version = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": ""}
        self._answer(version if self.path == "/api/version" else {})

    def do_POST(self) -> None:
        self.jobs.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer({"job_id": "raysubmit_1", "submission_id": "raysubmit_1"})

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    Server.jobs.clear()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join(10)
    found.server_close()


@pytest.mark.ray
def test_the_same_command_is_handed_over_without_its_flags(capfd, server, tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_RUN__SEED", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    words = ("--profile", "16xH100-separate", "--steps", "7", "--resume", "auto", "--run-dir", "runs/a", "run.seed=4")
    code, out, err = train(capfd, *words, "--submit", "--ray-address", server)
    assert (code, out) == (0, "raysubmit_1\n")
    assert "ray job logs --follow" in err
    (job,) = Server.jobs
    assert job["entrypoint"] == (
        f"cd {tmp_path} && exec rlctl train --profile 16xH100-separate --steps 7 run.seed=4 "
        "--run-dir runs/a --resume auto"
    )
    assert job["runtime_env"]["env_vars"]["RLCTL_RUN__SEED"] == "3"
    assert "secret" not in json.dumps(job)
    code, out, _ = train(capfd, *words, "--submit", "--ray-address", server, "--json")
    assert code == 0
    assert json.loads(out)["job_id"] == "raysubmit_1"
    assert json.loads(out)["run_dir"] == "runs/a"
    code, _, _ = train(capfd, "--profile", "cpu-separate", "--submit", "--ray-address", server)
    assert code == 0
    assert " --profile cpu-separate cluster.launcher=ray --run-dir runs/" in Server.jobs[-1]["entrypoint"]
