"""Places on this machine, their processes children of this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from rlctl.errors import UnavailableError
from rlctl.process import Child, Start, start
from rlctl.runtime.launch.launcher import Place
from rlctl.runtime.launch.places import places, shown
from rlctl.runtime.launch.run_folder import RunFolder, end_leftovers
from rlctl.schema import Config


class ProcessLauncher:
    """A Launcher of plain child processes.

    Args:
        config: resolved.

    Raises:
        UnavailableError: the run is of several nodes.
    """

    def __init__(self, config: Config) -> None:
        if config.cluster.nodes > 1:
            raise UnavailableError(
                f"plain processes run on one node, and this run has {config.cluster.nodes}",
                where="cluster.launcher",
                fix="set cluster.launcher=ray, and give the cluster's address by --ray-address or RAY_ADDRESS",
            )
        self._kind = config.cluster.device
        self._places = places(config)
        end_leftovers()
        self._folder = RunFolder()
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._closed = False

    def starter(self, place: Place) -> Start:
        visible = shown(self._kind, [number for _, number in self._places[place]], os.environ)
        ours = {**visible, **self._folder.env}

        def start_there(
            target: str,
            *,
            name: str,
            timeout: float = 60.0,
            output: Path | None = None,
            env: Mapping[str, str] | None = None,
        ) -> Child:
            assert not self._closed
            child = start(target, name=name, timeout=timeout, output=output, env={**ours, **(env or {})})
            with self._lock:
                self._children = [*(other for other in self._children if other.alive()), child]
            return child

        return start_there

    def address(self) -> str | None:
        return None

    def one_machine(self) -> bool:
        return True

    def here(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        self._closed = True
        with self._lock:
            children, self._children = self._children, []
        for child in children:  # all at once, and only then wait for each
            child.signal(signal.SIGKILL, group=True)
        for child in children:
            child.kill()
        self._folder.close()
