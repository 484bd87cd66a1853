"""All rules of ``rlctl topology --check``, on what is known: a node, this host, a profile, a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlctl.errors import CheckError
from rlctl.hardware.host import HostFacts, host_facts
from rlctl.hardware.link_graph import NodeGraph
from rlctl.hardware.local import Machine
from rlctl.hardware.nccl_conf import conf_variables
from rlctl.hardware.packages import installed_versions
from rlctl.hardware.placement import PlacementError, Slot, place
from rlctl.hardware.rules import nccl, network
from rlctl.hardware.rules.devices import child_devices, visible_devices
from rlctl.hardware.rules.graph import nearest_cards, tensor_parallel_links
from rlctl.hardware.rules.host import huge_pages, libraries, locked_memory, rdma_access, shared_memory
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn
from rlctl.hardware.rules.packages import package_versions
from rlctl.hardware.visible_devices import seen_graph
from rlctl.ops.model_rules import bucket_size, tensor_parallel_heads
from rlctl.ops.planned_model import PlannedModel
from rlctl.ops.requirements import compare
from rlctl.ops.resolve import Resolution
from rlctl.schema import Config
from rlctl.sync.traits import BACKEND_TRAITS


@dataclass(frozen=True)
class Surroundings:
    """What the rules look at.

    Attributes:
        graph: the node.
        env: environment variables, those of NCCL's files among them.
        interfaces: network interfaces with an address; None when they are another node's.
        host: this host; None when the node is another one.
        machine: the same.
        packages: name -> version; None when they are another node's.
    """

    graph: NodeGraph
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    interfaces: tuple[str, ...] | None = None
    host: HostFacts | None = None
    machine: Machine | None = None
    packages: Mapping[str, str] | None = None

    @property
    def cards(self) -> list[str]:
        """Names of InfiniBand and RoCE devices; a dump lists no other cards."""
        return [nic.name for nic in self.graph.nics if nic.rdma is not False]


def surroundings_here(graph: NodeGraph, interfaces: tuple[str, ...], machine: Machine) -> Surroundings:
    """Return this machine as the rules look at it."""
    from_files = {name: value for name, (value, _) in conf_variables(os.environ).items()}
    env = {**from_files, **os.environ}
    return Surroundings(graph, env, interfaces, host_facts(), machine, installed_versions())


def run_checks(
    around: Surroundings,
    resolution: Resolution | None = None,
    model: PlannedModel | None = None,
    *,
    child: str | None = None,
) -> list[Outcome]:
    """Return the outcome of every rule.

    Args:
        around: the node and the host.
        resolution: the profile's configuration; rules on it are left out when None.
        model: that is sent.
        child: CUDA_VISIBLE_DEVICES that a launcher gives to an engine's process, to be checked too.
    """
    config = resolution.config if resolution is not None else None
    nodes = config.cluster.nodes if config is not None else 1
    found = list(_of_profile(around, resolution, model)) if resolution is not None else []
    found += visible_devices(around.env, around.graph.gpus, needed=_needed(config))
    if child is not None:
        found.append(child_devices(around.env.get("CUDA_VISIBLE_DEVICES"), child, around.graph.gpus))
    found += nearest_cards(around.graph, around.env)
    found += nccl.variable_names(around.env)
    found += nccl.variable_values(around.env)
    found += nccl.timeouts(around.env, config.sync.timeout if config is not None else None)
    found.append(network.socket_interface(around.env, around.interfaces, nodes=nodes))
    found.append(network.cards(around.env, around.cards))
    found += network.other_interfaces(around.env, around.interfaces, around.cards)
    found += _of_host(around, config, model)
    return found


def require_passed(outcomes: list[Outcome]) -> None:
    """Raise CheckError when a rule failed."""
    failed = [outcome for outcome in outcomes if outcome.status == "fail"]
    if failed:
        rules = ", ".join(dict.fromkeys(outcome.rule for outcome in failed))
        raise CheckError(f"{len(failed)} of {len(outcomes)} checks failed: {rules}")


def _needed(config: Config | None) -> int:
    return config.cluster.devices_per_node if config is not None and config.cluster.device == "cuda" else 0


def _of_profile(around: Surroundings, resolution: Resolution, model: PlannedModel | None) -> list[Outcome]:
    config = resolution.config
    found = [
        fail("profile-rules", f"{v.where}: {v.message}" if v.where else v.message, v.fix or "change the key")
        for v in resolution.violations
    ]
    found = found or [ok("profile-rules", f"{len(resolution.checks)} rules of the profile and its mode hold")]
    found += _hardware(around, config)
    found += tensor_parallel_heads(config, model)
    found.append(bucket_size(config, model))
    found.append(_backend(config))
    try:
        slots = place(config.cluster, config.placement)
    except PlacementError as error:
        return [*found, fail("placement", error.message, "more nodes, or fewer ranks")]
    return [*found, *_links(around, config, slots)]


def _hardware(around: Surroundings, config: Config) -> list[Outcome]:
    rule = "profile-hardware"
    if around.machine is None:
        return []
    needs = compare(config.cluster, around.machine)
    if needs.met:
        return [ok(rule, f"needed: {needs.needed}; here: {needs.found}")]
    if not around.machine.devices:
        return [skipped(rule, f"no GPU here to compare with {needs.needed}")]
    return [fail(rule, f"missing: {', '.join(needs.missing)}", "another profile, or another node")]


def _backend(config: Config) -> Outcome:
    rule, name = "backend", config.sync.backend
    traits = BACKEND_TRAITS.get(name)
    if traits is None:
        return skipped(rule, f"{name} comes from another package")
    layout, device = config.placement.layout, config.cluster.device
    fitting = [n for n, t in BACKEND_TRAITS.items() if layout in t.layouts and device in t.devices]
    if layout not in traits.layouts or device not in traits.devices:
        return fail(rule, f"{name} is not for layout {layout} on {device}", f"one of {', '.join(fitting)}")
    if traits.one_node and config.cluster.nodes > 1 and layout == "separate":
        return fail(rule, f"{name} stays within a node, and the cluster has {config.cluster.nodes}",
                    f"one of {', '.join(n for n in fitting if not BACKEND_TRAITS[n].one_node)}")  # fmt: skip
    return ok(rule, f"{name} is for layout {layout} on {device}")


def _links(around: Surroundings, config: Config, slots: list[Slot]) -> list[Outcome]:
    graph = around.graph
    if config.cluster.device != "cuda":
        return []
    if not graph.gpus:
        return [skipped("tensor-parallel-links", "no GPU is known: run it on a node, or give a dump with --from")]
    found = tensor_parallel_links(seen_graph(graph, around.env.get("CUDA_VISIBLE_DEVICES")), slots)
    there, said = len(around.cards), config.cluster.links.nics_per_node
    if config.cluster.nodes > 1 and there != said:
        message = f"the profile counts {said} network cards a node, and there are {there}"
        found.append(warn("card-count", message, f"cluster.links.nics_per_node={there}"))
    return found


def _of_host(around: Surroundings, config: Config | None, model: PlannedModel | None) -> list[Outcome]:
    rdma = any(nic.rdma for nic in around.graph.nics)
    if around.host is None:
        return [
            skipped("host", "shared memory, locked memory, libraries and packages are another node's: run it there")
        ]
    backend = config.sync.backend if config is not None else None
    host, packages = around.host, around.packages or {}
    needed, what = _shared_bytes(config, model)
    return [
        shared_memory(host, needed, what),
        locked_memory(host, rdma=rdma, backend=backend),
        huge_pages(host),
        *rdma_access(host, rdma=rdma, gpus=bool(around.graph.gpus)),
        *libraries(host, rdma=rdma, backend=backend, packages=packages),
        *package_versions(packages),
    ]


def _shared_bytes(config: Config | None, model: PlannedModel | None) -> tuple[int, str]:
    """Return what a run puts into /dev/shm: the copies of the weights that its backend keeps on a node."""
    if config is None or model is None or config.cluster.device != "cpu":
        return 0, ""
    traits = BACKEND_TRAITS.get(config.sync.backend)
    if traits is None or not (traits.folder or config.sync.backend == "ipc"):
        return 0, ""
    copies = f"{traits.keeps} cop{'y' if traits.keeps == 1 else 'ies'} of the weights"
    return traits.keeps * model.nbytes, f"what backend {config.sync.backend} keeps there ({copies})"
