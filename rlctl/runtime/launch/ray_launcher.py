"""Places on a Ray cluster. Ray finds the nodes and tells of their ends; all else goes over connections of our own.

For each bundle one actor, the host, starts the processes of its places on the node.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.process import Child, Start, run_token
from rlctl.runtime.launch.bundles import Bundle, bundles, strategy
from rlctl.runtime.launch.desk import Desk
from rlctl.runtime.launch.host import Host
from rlctl.runtime.launch.host_messages import Hello
from rlctl.runtime.launch.launcher import Place
from rlctl.runtime.launch.ray_cluster import carried, cluster_address, connect, require_ray
from rlctl.runtime.launch.remote import HostLink
from rlctl.runtime.launch.run_folder import RunFolder, end_leftovers
from rlctl.schema import Config
from rlctl.sync.addresses import own_address
from rlctl.sync.deadline import Deadline

_PLACING_SECONDS = 120.0
_HOST_SECONDS = 120.0
_WHY_SECONDS = 1.0


class RayLauncher:
    """A Launcher on a Ray cluster.

    Args:
        config: resolved.

    Raises:
        UnavailableError: Ray is absent, or the cluster has not what the run needs.
        RlctlError: the cluster is not there.
    """

    def __init__(self, config: Config) -> None:
        require_ray()
        self._kind = config.cluster.device
        self._bundles = bundles(config)
        self._numbers = itertools.count()
        self._hosts: dict[int, HostLink] = {}
        self._making = [threading.Lock() for _ in self._bundles]
        with ExitStack() as stack:
            end_leftovers()
            folder = RunFolder()
            stack.callback(folder.close)
            wanted = cluster_address(config.cluster.ray_address, os.environ)
            cores = sum(bundle.size for bundle in self._bundles)
            self._ray, self._address = connect(wanted, cores=cores, folder=folder, stack=stack)
            self._group = _placed(self._ray, [b.resources(self._kind) for b in self._bundles], strategy(config), stack)
            here = self._ray.get_runtime_context().get_node_id()
            nodes = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"].values()
            self._near = all(node == here for node in nodes)
            self._carried = folder.env if self._near else carried(os.environ)
            self._here = "127.0.0.1" if self._near else _own_address(self._ray, config.cluster.links.interface)
            self._desk = Desk(f"tcp:{self._here}:0", run_token())
            stack.callback(self._desk.close)
            stack.callback(self._end_hosts)
            with ThreadPoolExecutor(len(self._bundles)) as pool:
                list(pool.map(self._host, range(len(self._bundles))))
            self._stack = stack.pop_all()

    def starter(self, place: Place) -> Start:
        number, bundle = next((n, b) for n, b in enumerate(self._bundles) if place in b.places)

        def start_there(
            target: str,
            *,
            name: str,
            timeout: float = 60.0,
            output: Path | None = None,
            env: Mapping[str, str] | None = None,
        ) -> Child:
            return self._host(number).start(
                target,
                name=name,
                timeout=timeout,
                output=output,
                env=env or {},
                kind=self._kind,
                devices=bundle.places[place],
            )

        return start_there

    def address(self) -> str | None:
        return self._address

    def one_machine(self) -> bool:
        return self._near

    def here(self) -> str:
        return self._here

    def close(self) -> None:
        self._stack.close()

    def _host(self, number: int) -> HostLink:
        """Return the host of a bundle; another one when it is gone."""
        with self._making[number]:
            link = self._hosts.get(number)
            if link is None or link.lost:
                link = self._hosts[number] = self._new_host(number, self._bundles[number])
            return link

    def _new_host(self, number: int, bundle: Bundle) -> HostLink:
        ray, host = self._ray, next(self._numbers)
        asked = bundle.resources(self._kind)
        within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        actor = (
            ray.remote(Host)
            .options(
                num_cpus=asked.pop("CPU"),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                scheduling_strategy=within,
                max_restarts=0,
            )
            .remote(self._desk.address, run_token(), host, os.getpriority(os.PRIO_PROCESS, 0))
        )
        serving = actor.serve.remote()
        label = f"bundle {number}: {', '.join(map(str, bundle.places))}"
        channel = self._desk.take(Hello(host, -1), Deadline(_HOST_SECONDS), _unless_over(ray, serving, label))
        return HostLink(
            channel,
            host,
            self._desk,
            label=label,
            near=self._near,
            carried=self._carried,
            why=lambda: _why(ray, (actor, serving)),
        )

    def _end_hosts(self) -> None:
        for link in self._hosts.values():
            link.close()


def _placed(ray: ModuleType, asked: list[dict[str, float]], how: str, stack: ExitStack) -> Any:
    """Return the placement group of these bundles, once all of them have a node."""
    group = ray.util.placement_group(asked, strategy=how)
    stack.callback(ray.util.remove_placement_group, group)
    if not group.wait(_PLACING_SECONDS):
        total, free = ray.cluster_resources(), ray.available_resources()
        names = sorted({name for bundle in asked for name in bundle})
        lacks = ", ".join(
            f"{sum(b.get(name, 0) for b in asked):g} {name} asked, {free.get(name, 0):g} of {total.get(name, 0):g} free"
            for name in names
        )
        raise UnavailableError(
            f"the Ray cluster has no room for this run after {_PLACING_SECONDS:g} s: {lacks}",
            where="placement",
            fix="wait for other jobs to end, add nodes, or ask for less by placement.* and cluster.*",
        )
    return group


def _own_address(ray: ModuleType, interface: str | None) -> str:
    """Return the address of this machine that other nodes reach: the interface's, or the one that Ray found."""
    if interface is None:
        return str(ray.util.get_node_ip_address())
    address = own_address(interface)
    if address == interface and not re.fullmatch(r"[0-9a-fA-F.:]+", interface):
        raise UsageError(
            f"this machine has no interface {interface} with an address",
            where="cluster.links.interface",
            fix="name one that `ip -4 address` shows, the same on all nodes",
        )
    return address


def _unless_over(ray: ModuleType, serving: Any, label: str) -> Callable[[], None]:
    def check() -> None:
        ready, _ = ray.wait([serving], timeout=0)
        if ready:
            raise RlctlError(
                f"the host of {label} does not start: {_why(ray, (None, serving))}",
                fix="is rlctl installed on every node, in the same version?",
            )

    return check


def _why(ray: ModuleType, actor: tuple[Any, Any]) -> str:
    """Return in words how a host ended. ``actor``: the handle, which keeps it alive until then, and its result."""
    if not ray.is_initialized():  # this process ends; to ask would start another cluster
        return "ended"
    try:
        ray.get(actor[1], timeout=_WHY_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return "closed its connection"
    except ray.exceptions.RayError as error:
        return how_it_died(str(error))
    return "ended"


def how_it_died(text: str) -> str:
    """Return what matters of Ray's long message on a dead actor."""
    text = " ".join(text.split())
    found = re.search(r"Worker exit detail: ([^.]+)", text) or re.search(r"(?:is dead|died) because ([^.]+)", text)
    return f"died: {found.group(1) if found else text[:200]}"
