"""``--profile auto``: the shipped profile that makes the most of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.config import DEFAULT_PROFILE, load_config
from rlctl.config.profiles import profile_names
from rlctl.hardware.local import Machine, this_machine
from rlctl.ops.requirements import compare
from rlctl.schema.layout import ClusterConfig

AUTO = "auto"


@dataclass(frozen=True)
class ProfileChoice:
    """A shipped profile and why it was chosen."""

    name: str
    why: str


def choose_profile(machine: Machine | None = None, env: Mapping[str, str] | None = None) -> ProfileChoice:
    """Return the shipped profile that uses the most devices of those whose needs are met.

    Args:
        machine: to choose for; this one when None.
        env: variables, of which Slurm's says how many nodes like this one there are; the process's own when None.
    """
    machine = this_machine() if machine is None else machine
    nodes = _nodes(os.environ if env is None else env)
    if not machine.devices:
        return ProfileChoice(DEFAULT_PROFILE, f"found {machine.describe()}")
    found = f"found {machine.describe()}" + (f" on each of {nodes} nodes" if nodes > 1 else "")
    fitting = {
        name: cluster
        for name in profile_names()
        if (cluster := load_config(name, env={}).config.cluster).device == machine.kind
        and cluster.nodes <= nodes
        and compare(cluster, machine).met
    }
    if not fitting:
        return ProfileChoice(DEFAULT_PROFILE, f"{found}, which no shipped profile is for; this one uses the CPU")
    name = max(fitting, key=lambda name: _devices(fitting[name]))
    used, there = _devices(fitting[name]), nodes * len(machine.devices)
    return ProfileChoice(name, f"{found}; it uses {'all' if used == there else f'{used} of the {there}'} devices")


def _devices(cluster: ClusterConfig) -> int:
    return cluster.nodes * cluster.devices_per_node


def _nodes(env: Mapping[str, str]) -> int:
    text = env.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() and int(text) else 1
