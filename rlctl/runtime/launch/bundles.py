"""What a run asks of a Ray cluster: bundles of devices that lie on one node, and which place is in which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlctl.errors import UnavailableError
from rlctl.hardware.placement import place as place_ranks
from rlctl.runtime.launch.launcher import Place
from rlctl.runtime.launch.places import Device, places
from rlctl.schema import Config

_RESOURCES = {"cuda": "GPU", "npu": "NPU"}


@dataclass(frozen=True)
class Bundle:
    """Devices of one node that belong together, since places share them.

    Attributes:
        size: how many devices.
        places: each with its devices, counted within the bundle.
    """

    size: int
    places: Mapping[Place, tuple[int, ...]]

    def resources(self, kind: str) -> dict[str, float]:
        """Return what Ray is asked for, by its names: a core for each device, and the devices that are no cores."""
        asked = {"CPU": float(self.size)}
        if kind in _RESOURCES:
            asked[_RESOURCES[kind]] = float(self.size)
        return asked


def bundles(config: Config) -> list[Bundle]:
    """Return the bundles of a run, in the order of their devices.

    Places that share a device are in one bundle (a colocated replica and its trainer ranks), and so are all devices of
    a tensor-parallel group, which must not be torn apart; any others have bundles of their own.

    Raises:
        UnavailableError: a tensor-parallel group does not fit into one node.
        PlacementError: the ranks do not fit on the cluster.
    """
    found = places(config)
    groups = _Groups()
    for devices in found.values():
        groups.join(devices)
    tensor_parallel: dict[int, list[Device]] = {}
    for slot in place_ranks(config.cluster, config.placement):
        if slot.role == "trainer":
            tensor_parallel.setdefault(slot.group, []).append((slot.node, slot.device))
    for devices in tensor_parallel.values():
        groups.join(devices)
    made = []
    for members in groups.all():
        if len({node for node, _ in members}) > 1:
            raise UnavailableError(
                f"a tensor-parallel group of {len(members)} devices does not fit into one node",
                where="placement",
                fix="lower placement.trainer_tp or placement.replica_tp, or raise cluster.devices_per_node",
            )
        inside = {
            place: tuple(members.index(device) for device in devices)
            for place, devices in found.items()
            if devices[0] in members
        }
        made.append(Bundle(len(members), inside))
    return made


def strategy(config: Config) -> str:
    """Return how Ray spreads the bundles: on as few nodes as it can, on one where the plan is of one."""
    return "STRICT_PACK" if config.cluster.nodes == 1 else "PACK"


class _Groups:
    """Devices in groups that grow together."""

    def __init__(self) -> None:
        self._of: dict[Device, set[Device]] = {}

    def join(self, devices: Iterable[Device]) -> None:
        whole = set(devices)
        for device in list(whole):
            whole |= self._of.get(device, set())
        for device in whole:
            self._of[device] = whole

    def all(self) -> list[list[Device]]:
        """Return each group once, sorted, in the order of their first devices."""
        return sorted(sorted(group) for group in {id(group): group for group in self._of.values()}.values())
