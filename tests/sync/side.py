"""Engines of both sides of a sync in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from rlctl.sync.calls import call
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member

Weights = dict[str, torch.Tensor]
E = TypeVar("E", bound=CheckpointEngine)


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run all at once, each in its thread, and return their results."""
    return [future.result(30) for future in [call(action, "test") for action in actions]]


class Side(Generic[E]):
    """See the module. Options: those of the engines."""

    def __init__(self, engine: type[E], trainers: int, rollouts: int, **options: Any) -> None:
        given = {"bucket_size": 1 << 20, "timeout": 10.0, "token": "test", **options}
        self.engine = engine
        self.options = EngineOptions(**given)
        self.trainers = [engine(Member("trainer", rank, trainers), self.options) for rank in range(trainers)]
        self.rollouts = [engine(Member("rollout", rank, rollouts), self.options) for rank in range(rollouts)]

    @property
    def all(self) -> list[E]:
        return [*self.trainers, *self.rollouts]

    def meet(self) -> None:
        metadata = [engine.prepare() for engine in self.all]
        kwargs = self.engine.build_topology(len(self.trainers), len(self.rollouts), metadata)
        together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(self.all, kwargs, strict=True)))

    def sync(self, version: int, source: Mapping[str, torch.Tensor], targets: Iterable[Weights]) -> None:
        self.meet()
        together(
            *(lambda e=e: e.send_weights(source.items(), version) for e in self.trainers),
            *(lambda e=e, t=t: e.receive_into(version, t) for e, t in zip(self.rollouts, targets, strict=True)),
        )
        for engine in self.all:
            engine.finalize()

    def sit(self, rollouts: list[E]) -> None:
        """Have these rollout workers from now on."""
        self.rollouts = rollouts
        for rank, engine in enumerate(rollouts):
            engine.seat(rank, len(rollouts))

    def close(self) -> None:
        for engine in self.all:
            engine.close()


@contextmanager
def side(engine: type[E], trainers: int, rollouts: int, **options: Any) -> Iterator[Side[E]]:
    made = Side(engine, trainers, rollouts, **options)
    yield made
    made.close()
