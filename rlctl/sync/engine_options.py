"""Who takes part in a sync, and what every backend is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rlctl.errors import UsageError
from rlctl.sync.addresses import own_address
from rlctl.sync.digest import Verify
from rlctl.sync.slicing import Layouts

Role = Literal["trainer", "rollout"]


@dataclass(frozen=True)
class Member:
    """One process that takes part: ``rank`` of ``world`` on its own side. ``part``: which rank of its replica a rollout
    member is, where layouts are declared."""

    role: Role
    rank: int
    world: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True)
class EngineOptions:
    """What every backend is told; all members of a sync are told the same.

    Attributes:
        bucket_size: bytes of one bucket. An engine holds two of them, however many trainer ranks send.
        timeout: seconds for one sync, unless ``prepare`` is given less.
        verify: how much is hashed.
        senders: most trainer ranks that send at the same time, each its share of the tensors.
        interface: address that sockets bind to; None is loopback.
        token: the run's secret, that every connection proves to know.
        device: where the engine's buffers are; without a number it is the current device of the thread that makes the
            engine.
        delta: tensors go as changes against the last committed version, where the receivers have it; each trainer
            rank that sends keeps a copy of what it sent.
        layouts: of the trainer's ranks and of a replica's: each rank gets slices then, all trainer ranks send. Also as
            plain data, as it comes in a message. None: workers get whole tensors.
        extras: options of one backend, of types that msgpack knows.
    """

    bucket_size: int = 512 << 20
    timeout: float = 300.0
    verify: Verify = "full"
    senders: int = 1
    interface: str | None = None
    token: str = ""
    device: str = "cpu"
    delta: bool = False
    layouts: Layouts | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: object = self.layouts
        if isinstance(given, Mapping):
            object.__setattr__(self, "layouts", msgspec.convert(given, Layouts))
        if self.layouts is not None and self.delta:
            raise UsageError(
                "changes are made against what a sender sent to all, and slices go to each rank apart",
                fix="delta off, or no layouts: workers get whole tensors then",
            )

    @property
    def host(self) -> str:
        """The address to bind to."""
        return own_address(self.interface) if self.interface else "127.0.0.1"
