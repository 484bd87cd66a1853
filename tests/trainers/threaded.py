"""Runs whose rollouts are made in a thread beside the trainer: one engine in this process, behind a lock."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlctl.ops import session
from rlctl.rollout.base import RolloutEngine
from rlctl.runtime.in_process import InProcessGroup
from rlctl.sync.colocated import ColocatedSync

LAYOUT = (
    "sync.backend=ipc", "placement.layout=separate", "placement.replicas=1", "placement.trainer_ranks=1",
    "cluster.devices_per_node=2",
)  # fmt: skip


def locked(engine: RolloutEngine) -> RolloutEngine:
    """Return the engine with a lock around each of its calls: a sync comes between two steps."""
    lock = threading.RLock()

    def guard(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return getattr(engine, name)(*args, **kwargs)

        return call

    names = {name for name in dir(RolloutEngine) if not name.startswith("_")}
    properties = {name for name in names if isinstance(getattr(RolloutEngine, name), property)}
    members: dict[str, Any] = {name: guard(name) for name in names - properties}
    members |= {name: property(lambda self, name=name: getattr(engine, name)) for name in properties}
    members |= {"__init__": lambda self: None, "replica": engine.replica}
    return type("Locked", (RolloutEngine,), members)()


class ThreadedGroup(InProcessGroup):
    """See InProcessGroup. Nothing is shared, so nobody sleeps; requests go on after a sync.

    Attributes:
        calls: what was asked of the rollout side.
        hybrids: how many replicas there are to lend; lending one only notes it.
    """

    hybrids = 0

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.calls: list[str] = []
        self.engine = locked(self.engine)
        self._sync = ColocatedSync(self.model, [self.engine], timeout=60.0, on_phase=lambda *_: None)

    def sync_weights(self, version: int) -> Any:
        self.calls.append(f"sync {version}")
        return super().sync_weights(version)

    def abort(self) -> None:
        raise AssertionError("nothing is cut in the background")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def to_rollout(self, version: int) -> None:
        self.calls.append(f"lend {version}")

    def to_trainer(self) -> None:
        self.calls.append("take back")


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> type[ThreadedGroup]:
    """Have sessions of this test built over a ``ThreadedGroup``."""

    class Group(ThreadedGroup):
        """Of this test."""

    monkeypatch.setattr(session, "needs_processes", lambda config: False)
    monkeypatch.setattr(session, "InProcessGroup", Group)
    return Group
