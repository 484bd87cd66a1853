"""The launcher of a configuration."""

from __future__ import annotations

from rlctl.errors import UnavailableError
from rlctl.runtime.launch.launcher import Launcher
from rlctl.runtime.launch.processes import ProcessLauncher
from rlctl.schema import Config


def make_launcher(config: Config) -> Launcher:
    """Return the launcher that ``cluster.launcher`` names.

    Raises:
        UnavailableError: this machine, or the cluster, lacks what it needs.
    """
    if config.cluster.launcher == "ray":
        raise UnavailableError("this version of rlctl starts no processes by Ray", fix="set cluster.launcher=processes")
    return ProcessLauncher(config)
