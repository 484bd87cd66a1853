"""The places of a configuration and the devices of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.errors import RlctlError
from rlctl.hardware.placement import place as place_ranks
from rlctl.hardware.visible_devices import parse_visible
from rlctl.runtime.launch.launcher import Place, PlaceKind
from rlctl.schema import Config

_KINDS: Mapping[str, PlaceKind] = {
    "trainer": "trainer",
    "rollout": "replica",
    "hybrid": "hybrid",
    "reward": "reward",
}
# What hides devices from a process, by kind of device.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
Device = tuple[int, int]  # of which node, and its number there


def places(config: Config) -> dict[Place, list[Device]]:
    """Return every place with its devices, in the order of its ranks. Raises PlacementError."""
    found: dict[Place, list[Device]] = {}
    for slot in place_ranks(config.cluster, config.placement):
        # A trainer's rank is a process of its own; of a replica, all ranks are behind one.
        index = slot.rank if slot.role in ("trainer", "reward") else slot.group
        found.setdefault(Place(_KINDS[slot.role], index), []).append((slot.node, slot.device))
    return found


def shown(kind: str, numbers: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows a process these devices, of those that ``environ`` shows, and no others.

    Args:
        kind: of device; a CPU's processes share all cores.
        numbers: which, counted among those that are visible.
        environ: of the process that starts it.

    Raises:
        RlctlError: fewer are visible.
    """
    variable = VISIBLE.get(kind)
    if variable is None:
        return {}
    visible = parse_visible(environ.get(variable)).entries
    if visible is None:
        return {variable: ",".join(map(str, numbers))}
    if max(numbers) >= len(visible):
        raise RlctlError(
            f"device {max(numbers)} is asked for, and {variable}={environ[variable]!r} shows {len(visible)}",
            where="placement",
            fix=f"unset {variable}, or lower placement.trainer_ranks or placement.replicas",
        )
    return {variable: ",".join(str(visible[number]) for number in numbers)}
