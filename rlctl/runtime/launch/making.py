"""The launcher of a configuration."""

from __future__ import annotations

from rlctl.runtime.launch.launcher import Launcher
from rlctl.runtime.launch.processes import ProcessLauncher
from rlctl.schema import Config


def make_launcher(config: Config) -> Launcher:
    """Return the launcher that ``cluster.launcher`` names; it is the caller's to close.

    Raises:
        UnavailableError: this machine, or the cluster, lacks what it needs.
        RlctlError: the cluster is not there.
    """
    if config.cluster.launcher == "ray":
        from rlctl.runtime.launch.ray_launcher import RayLauncher

        return RayLauncher(config)
    return ProcessLauncher(config)
