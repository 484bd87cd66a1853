"""The batch script: read by bash, and run with stand-ins for Slurm's own programs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlctl.config import list_profiles, load_config
from rlctl.ops.sbatch import batch_script

ARGUMENTS = ["--profile", "p", "run.steps=5", "task.name=my file's.jsonl", "x=$HOME"]

# Slurm does not run here; its three programs are replaced by scripts that do the part that the job script relies on.
STAND_INS = {
    "scontrol": 'case $1 in show) printf "node1\\nnode2\\n";; *) echo "scontrol $*" >>"$LOG";; esac',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ip": 'echo "2: eth0    inet 10.1.2.3/24 brd 10.1.2.255"',
    "hostname": "echo 10.1.2.3",
    "ray": 'echo "ray $*" >>"$LOG"; echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$LOG.secret"',
    "sleep": ":",
    "python": 'echo "${RAY_NODES}"',
    "rlctl": (
        'printf "%s\\n" "$@" >"$LOG.arguments"; trap "echo term >>\\"$LOG\\"; exit 75" TERM\n'
        'if [[ -n ${WAIT:-} ]]; then echo up >"$LOG.up"; for _ in {1..300}; do /bin/sleep 0.1; done; fi; exit "$CODE"'
    ),
}


def script_of(profile: str, *, nodes: int | None = None) -> str:
    config = load_config(profile, env={}).config
    if nodes is not None:
        config.cluster.nodes = nodes
    return batch_script(config, name=profile, arguments=ARGUMENTS)


def start(folder: Path, script: str, **environment: str) -> subprocess.Popen[str]:
    programs = folder / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    bash = shutil.which("bash")
    assert bash is not None
    base = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "CODE": "0",
        "RAY_NODES": "2",
    }
    return subprocess.Popen(
        [bash, str(folder / "job.sh")], env=base | environment, cwd=folder, stderr=subprocess.PIPE, text=True
    )


def log_of(folder: Path) -> list[str]:
    file = folder / "log"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("profile", [info.name for info in list_profiles()])
def test_bash_reads_it_and_slurm_finds_its_lines(profile: str) -> None:
    script = script_of(profile)
    subprocess.run(["bash", "-n"], input=script, text=True, timeout=30, check=True)
    config = load_config(profile, env={}).config
    lines = script.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert f"#SBATCH --nodes={config.cluster.nodes}" in lines
    assert "#SBATCH --requeue" in lines
    several = config.cluster.nodes > 1
    assert f"#SBATCH --signal={'B:' if several else ''}TERM@120" in lines
    assert ("ray start" in script) is several
    if config.cluster.device == "cuda":
        assert f"#SBATCH --gpus-per-node={config.cluster.devices_per_node}" in lines
    # Slurm stops reading options at the first command.
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < first_command


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_exit_code_is_passed_on_and_75_requeues(tmp_path: Path, nodes: int, code: int) -> None:
    job = start(tmp_path, script_of("8xH100-colocate", nodes=nodes), CODE=str(code))
    job.communicate(timeout=30)
    assert job.returncode == code
    assert ("scontrol requeue 42" in log_of(tmp_path)) is (code == 75)
    words = (tmp_path / "log.arguments").read_text().splitlines()
    by_ray = ["cluster.launcher=ray"] if nodes == 2 else []
    assert words == ["train", *ARGUMENTS, *by_ray, "--resume", "auto", "--run-dir", "runs/8xH100-colocate-42"]


def test_several_nodes_join_one_ray_cluster(tmp_path: Path) -> None:
    job = start(tmp_path, script_of("16xH100-separate"))
    job.communicate(timeout=30)
    assert job.returncode == 0
    started = [line for line in log_of(tmp_path) if line.startswith("ray start")]
    assert len(started) == 2
    assert all("--num-gpus=8" in line for line in started)
    head = next(line for line in started if "--head" in line)
    worker = next(line for line in started if "--head" not in line)
    assert "--node-ip-address=10.1.2.3 --port=20042" in head
    assert "--address=10.1.2.3:20042" in worker
    head_secret, worker_secret = (tmp_path / "log.secret").read_text().splitlines()
    assert head_secret == worker_secret
    assert re.fullmatch("token [0-9a-f]{64}", head_secret)


def test_a_node_that_stays_away_fails_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, script_of("16xH100-separate"), RAY_NODES="1")
    _, err = job.communicate(timeout=30)
    assert job.returncode == 1
    assert "only 1 of 2 nodes came up" in err
    assert not (tmp_path / "log.arguments").exists()


def test_the_signal_reaches_the_trainer_of_several_nodes(tmp_path: Path) -> None:
    job = start(tmp_path, script_of("16xH100-separate"), WAIT="1")
    deadline = time.monotonic() + 20
    while not (tmp_path / "log.up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=30)
    assert job.returncode == 75
    assert {"term", "scontrol requeue 42"} <= set(log_of(tmp_path))


def test_odd_names_become_folder_names() -> None:
    script = batch_script(load_config(None, env={}).config, name="../my profile", arguments=[])
    assert "#SBATCH --job-name=..-my-profile" in script
    assert '"runs/..-my-profile-$SLURM_JOB_ID"' in script
