"""The report to paste into a bug: versions, limits and the variables that transports read, without secrets."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.hardware.host import HostFacts, host_facts
from rlctl.hardware.nccl_conf import conf_variables
from rlctl.hardware.packages import installed_versions

_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "UCX_", "GLOO_", "MC_", "NIXL_", "VLLM_", "RAY_",
             "OMP_", "MKL_", "KMP_", "HF_HUB_", "RLCTL_", "ASCEND_", "HCCL_", "TP_SOCKET_")  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "MASTER_PORT", "WORLD_SIZE")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PSK|CREDENTIAL|API_?KEY|PRIVATE|AUTH", re.IGNORECASE)
HIDDEN = "(set, not shown)"


@dataclass(frozen=True)
class EnvironmentReport:
    """What a run finds beside its devices.

    Attributes:
        python, system: their versions.
        packages: name -> version.
        variables: what the environment sets that a transport, torch or an engine reads; secrets are hidden.
        from_files: variables that NCCL takes from its files -> (value, file).
        host: limits and libraries.
    """

    python: str
    system: str
    packages: dict[str, str]
    variables: dict[str, str]
    from_files: dict[str, tuple[str, str]]
    host: HostFacts

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        host = self.host
        return {
            "python": self.python,
            "system": self.system,
            "packages": self.packages,
            "variables": self.variables,
            "nccl_conf": {name: value for name, (value, _) in self.from_files.items()},
            "host": {
                "shm_bytes": host.shm_total,
                "memlock_bytes": host.memlock,
                "hugepages": host.hugepages,
                "transparent_hugepages": host.transparent_hugepages,
                "libraries": {name: place is not None for name, place in host.libraries.items()},
                "rdma_doors": host.rdma_doors[0],
                "peer_memory": host.peer_memory,
            },
        }


def environment_report(env: Mapping[str, str] | None = None) -> EnvironmentReport:
    """Look at this process's environment, or at the variables given."""
    env = os.environ if env is None else env
    return EnvironmentReport(
        python=f"{platform.python_version()} ({sys.implementation.name})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=installed_versions(),
        variables=shown_variables(env),
        from_files={name: (_shown(name, value), file) for name, (value, file) in conf_variables(env).items()},
        host=host_facts(env),
    )


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that belong into a report, by name; values of secrets are replaced."""
    names = sorted(name for name in env if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: _shown(name, env[name]) for name in names}


def _shown(name: str, value: str) -> str:
    return HIDDEN if _SECRET.search(name) else value
