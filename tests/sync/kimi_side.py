"""Both sides of the engine kimi in threads of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from rlctl.sync.backends.kimi import Event, KimiEngine
from rlctl.sync.calls import call
from rlctl.sync.engine import EngineOptions, Member

BUCKET = 8192


class Side:
    """Engines of both sides in this process."""

    def __init__(self, trainers: int, rollouts: int, **options: Any) -> None:
        given = EngineOptions(**{"bucket_size": BUCKET, "timeout": 20.0, "token": "kimi", **options})
        self.trainers = [KimiEngine(Member("trainer", rank, trainers), given) for rank in range(trainers)]
        self.rollouts = [KimiEngine(Member("rollout", rank, rollouts), given) for rank in range(rollouts)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in [*self.trainers, *self.rollouts]:
            engine.close()

    def meet(self, rollouts: list[KimiEngine] | None = None) -> list[KimiEngine]:
        workers = self.rollouts if rollouts is None else rollouts
        for rank, worker in enumerate(workers):
            worker.seat(rank, len(workers))
        engines = [*self.trainers, *workers]
        kwargs = KimiEngine.build_topology(len(self.trainers), len(workers), [e.prepare() for e in engines])
        together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(engines, kwargs, strict=True)))
        return engines


def together(*actions: Callable[[], Any]) -> list[Any]:
    return [future.result(30) for future in [call(action, "test") for action in actions]]


def at(engine: KimiEngine, stage: str) -> dict[int, Event]:
    return {event.bucket: event for event in list(engine.events) if event.stage == stage}
