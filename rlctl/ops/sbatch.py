"""The Slurm batch script of a run, as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rlctl.errors import EXIT_REQUEUE
from rlctl.schema import Config

_GRACE_S = 120
_DEVICES = {"cuda": "gpus-per-node={count}", "npu": "gres=npu:{count}"}


def batch_script(config: Config, *, name: str, arguments: Sequence[str]) -> str:
    """Return a script for ``sbatch`` that runs ``rlctl train`` and goes on with the same run after a requeue.

    Two minutes before its end the job gets SIGTERM, saves a checkpoint and exits 75; the script then puts itself back
    into the queue under the same job id, and so finds the same run folder again.

    Args:
        config: resolved; the script depends on its cluster only.
        name: of the job and of the run folder.
        arguments: of ``rlctl train``, without ``--run-dir``, ``--resume`` and ``--overwrite``.
    """
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "rlctl"
    several = config.cluster.nodes > 1
    by_ray = ["cluster.launcher=ray"] if several and config.cluster.launcher != "ray" else []
    words = ["rlctl", "train", *map(shlex.quote, [*arguments, *by_ray]), "--resume", "auto", "--run-dir"]
    command = f'{" ".join(words)} "{_run_folder(label)}"'
    return "\n".join(
        [
            *_header(config, label, several=several),
            "",
            "set -euo pipefail",
            *_network(config),
            *(_ray_cluster(config) if several else []),
            *(_wait_for(command) if several else ["", "code=0", f"srun {command} || code=$?"]),
            "",
            f"if [[ $code == {EXIT_REQUEUE} ]]; then",
            "  # Stopped by a signal with a checkpoint saved.",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _run_folder(label: str) -> str:
    return f"runs/{label}-$SLURM_JOB_ID"


def _header(config: Config, label: str, *, several: bool) -> list[str]:
    cluster = config.cluster
    # Only the batch shell may get the signal where Ray runs in job steps of its own: Ray would die of it before the
    # trainer has saved anything. Without Ray the signal goes to the job step, which is the trainer.
    target = "B:" if several else ""
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={label}",
        f"#SBATCH --nodes={cluster.nodes}",
        "#SBATCH --ntasks-per-node=1",
    ]
    if cluster.device in _DEVICES:
        lines += [f"#SBATCH --{_DEVICES[cluster.device].format(count=cluster.devices_per_node)}"]
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    else:
        lines += [f"#SBATCH --cpus-per-task={config.run.threads or 2}"]
        lines += [f"#SBATCH --mem={cluster.host_memory >> 20}M"] if cluster.host_memory else []
    return [
        *lines,
        "#SBATCH --time=24:00:00",
        f"#SBATCH --signal={target}TERM@{_GRACE_S}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=slurm-%j.out",
        "# Your cluster may also want: #SBATCH --partition=... and #SBATCH --account=...",
        "# Submit it from the environment that rlctl is installed in; the job inherits that environment.",
    ]


def _network(config: Config) -> list[str]:
    interface = config.cluster.links.interface
    if interface is None:
        return []
    quoted = shlex.quote(interface)
    return ["", f"export NCCL_SOCKET_IFNAME={quoted} GLOO_SOCKET_IFNAME={quoted}"]


def _ray_cluster(config: Config) -> list[str]:
    nodes, count = config.cluster.nodes, config.cluster.devices_per_node
    interface = config.cluster.links.interface
    address = "hostname --ip-address"
    if interface is not None:
        address = f"ip -4 -o address show dev {shlex.quote(interface)}"
    devices = {"cuda": f"--num-gpus={count}", "npu": shlex.quote(f'--resources={{"NPU": {count}}}')}
    start = f"ray start --block --disable-usage-stats {devices.get(config.cluster.device, '')}".rstrip()
    return [
        "",
        "# One Ray node on each machine; the first is the head.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        'on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")',
        f"head_ip=$(\"${{on_head[@]}}\" {address} | grep -oE '([0-9]+\\.){{3}}[0-9]+' | sed -n 1p)",
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        'export RAY_ADDRESS="$head_ip:$port"',
        "# Nobody else on the network may use it; its workers run as everything else does.",
        'RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")',
        "export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0",
        f'"${{on_head[@]}}" {start} --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false &',
        f'srun --overlap --nodes={nodes - 1} --ntasks={nodes - 1} --exclude="$head" \\',
        f'  bash -c "sleep 10; exec {_inside_quotes(start)} --address=$RAY_ADDRESS" &',
        "",
        f"# Ten minutes for all {nodes} to come up.",
        "up() {",
        "  python -c 'import ray; ray.init(log_to_driver=False); print(sum(n[\"Alive\"] for n in ray.nodes()))'",
        "}",
        "for _ in $(seq 60); do",
        f"  [[ $(up 2>/dev/null) == {nodes} ]] && break",
        "  sleep 10",
        "done",
        f'[[ $(up) == {nodes} ]] || {{ echo "only $(up) of {nodes} nodes came up" >&2; exit 1; }}',
    ]


def _inside_quotes(text: str) -> str:
    return text.replace('"', '\\"')


def _wait_for(command: str) -> list[str]:
    return [
        "",
        "# In the background, so that the shell can pass the signal on; `wait` returns early when it does.",
        "trainer= stopped=",
        """trap 'stopped=1; [[ -z $trainer ]] || kill -TERM "$trainer"' TERM""",
        f"{command} &",
        "trainer=$!",
        '[[ -z $stopped ]] || kill -TERM "$trainer"',
        "code=0",
        'wait "$trainer" || code=$?',
        'while kill -0 "$trainer" 2>/dev/null; do',
        "  code=0",
        '  wait "$trainer" || code=$?',
        "done",
    ]
