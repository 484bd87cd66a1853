"""Who connects to whom on a node: a pure function of what the members said."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from rlctl.errors import UsageError
from rlctl.sync.engine import Kwargs, Metadata
from rlctl.sync.shared_memory import FOLDER

_IMPORTED = uuid.uuid4().hex


@cache
def node() -> str:
    """Return what only processes that see the same shared memory, and each other's sockets, have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{FOLDER.stat().st_dev}/{Path('/proc/self/ns/net').stat().st_ino}"


def process() -> str:
    """Return what only engines of this process have in common."""
    return f"{_IMPORTED}/{os.getpid()}"


def device_name(device: str) -> str:
    """Return the identity of a device: ``cpu``, or that of a CUDA device, by whatever number it is known here."""
    found = torch.device(device)
    if found.type != "cuda":
        return found.type
    return str(torch.cuda.get_device_properties(found).uuid)


def connections(backend: str, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
    """Return the arguments of ``init_process_group`` for each member. See ``CheckpointEngine.build_topology``.

    Trainer ranks deal the tensors out among them and send to all, ``senders`` at most. Where every rollout worker is
    on a device of one trainer rank, that rank sends it everything: nothing crosses between devices.

    Raises UsageError when a member is on another node.
    """
    assert len(metadata) == trainer_world + rollout_world
    trainers, rollouts = metadata[:trainer_world], metadata[trainer_world:]
    for place, member in enumerate(metadata):
        if member["node"] != metadata[0]["node"]:
            side, rank = ("trainer", place) if place < trainer_world else ("rollout", place - trainer_world)
            raise UsageError(
                f"{backend} moves weights within one node, and {side} {rank} is on another than trainer 0",
                where="sync.backend",
                fix="gloo, nccl, nixl, mooncake or file work between nodes",
            )
    feeds = _feeds(trainers, rollouts)
    senders = len(feeds[0]) if feeds else 1
    result: list[Kwargs] = []
    for rank, trainer in enumerate(trainers):
        fed = [place for place, sources in enumerate(feeds) if rank in sources]
        inside = [place for place in fed if rollouts[place]["process"] == trainer["process"]]
        if inside and trainer["device"] != "cpu" and not (backend == "naive" and len(inside) == len(fed)):
            raise UsageError(
                f"rollout {inside[0]} is in the process of trainer {rank}, and a process cannot open its own memory "
                "of a device by a handle",
                where="sync.backend",
                fix="naive, where all workers that a trainer rank feeds are in its process",
            )
        result.append(
            {
                "senders": senders,
                "share": feeds[fed[0]].index(rank) if fed else None,
                "receivers": [
                    [rollouts[place]["id"], f"rollout {place}", _keep(trainer, rollouts[place])] for place in fed
                ],
                "local": len(inside) == len(fed),
            }
        )
    result += [
        {
            "senders": senders,
            "sources": [
                [
                    trainers[rank]["id"],
                    trainers[rank]["sync"],
                    f"trainer {rank}",
                    trainers[rank]["address"],
                    _keep(trainers[rank], rollout),
                ]
                for rank in sources
            ],
        }
        for rollout, sources in zip(rollouts, feeds, strict=True)
    ]
    return result


def _feeds(trainers: Sequence[Metadata], rollouts: Sequence[Metadata]) -> list[list[int]]:
    """Return for each rollout worker the trainer ranks that send to it, for each as many."""
    devices = [trainer["device"] for trainer in trainers]
    near = [r["device"] for r in rollouts]
    if len(trainers) > 1 and all(device != "cpu" and device in devices for device in near):
        return [[devices.index(device)] for device in near]
    senders = list(range(min(trainers[0]["senders"], len(trainers))))
    return [senders for _ in rollouts]


def _keep(trainer: Metadata, rollout: Metadata) -> bool:
    """Whether both still have the connection of an earlier sync."""
    return trainer["id"] in rollout["held"] and rollout["id"] in trainer["held"]
