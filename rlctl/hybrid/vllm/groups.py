"""The ranks of each replica as vLLM knows them, in a process group that was there before vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rlctl.errors import UnavailableError

# What a worker of a dense model looks up; the groups of one rank are one object under several names.
_OF_REPLICA = ("_TP", "_ETP")
_ALONE = ("_DCP", "_PCP", "_PP", "_DP")
_OTHERS = ("_WORLD", "_NODE_COUNT", "_ENGRAM_DP", "_EP", "_EPLB", "_INNER_DP_WORLD")


class ReplicaGroups:
    """vLLM's groups of one engine. All ranks of the default group make one, those that do not generate too.

    vLLM keeps its groups in globals and cuts neighbours off ``range(world)``; here the ranks of a replica may be any,
    and the globals are those of this engine only while it computes.

    Args:
        replicas: ranks of each, ascending; the others stay alone.
        vllm_config: of the engine, from which the groups take their timeouts.
        device_index: of this rank's device among those that the process sees.

    Raises:
        UnavailableError: this vLLM keeps its groups otherwise.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], vllm_config: Any, device_index: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        missing = [name for name in (*_OF_REPLICA, *_ALONE, *_OTHERS) if not hasattr(parallel_state, name)]
        if missing:
            raise UnavailableError(f"{parallel_state.__name__} has no {', '.join(missing)}")
        self._module = parallel_state
        ranks = range(dist.get_world_size())
        seated = {rank for replica in replicas for rank in replica}
        together = [list(replica) for replica in replicas] + [[rank] for rank in ranks if rank not in seated]

        def made(name: str, groups: list[list[int]], *, talks: bool) -> Any:
            return parallel_state.GroupCoordinator(
                groups, device_index, current_platform.dist_backend, use_device_communicator=talks, group_name=name
            )

        with set_current_vllm_config(vllm_config):
            world = made("world", [list(ranks)], talks=False)
            # vLLM's way through shared memory is for groups named "tp": its waits spin, have no deadline, and outlive
            # a rank that was killed. This one goes over the process group.
            replica = made("replica", together, talks=True)
            alone = replica if all(len(group) == 1 for group in together) else made("alone", [[r] for r in ranks],
                                                                                   talks=False)  # fmt: skip
        self._mine: dict[str, Any] = dict.fromkeys(_OTHERS)
        self._mine |= {"_WORLD": world, "_NODE_COUNT": 1, **dict.fromkeys(_OF_REPLICA, replica)}
        self._mine |= dict.fromkeys(_ALONE, alone)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have vLLM use these groups for the time of a block."""
        before = {name: getattr(self._module, name) for name in self._mine}
        self._set(self._mine)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, groups: dict[str, Any]) -> None:
        for name, group in groups.items():
            setattr(self._module, name, group)
