"""Engines of one process: tensors go from hand to hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlctl.sync.backends.naive import NaiveEngine
from rlctl.sync.calls import call
from rlctl.sync.direct import DirectConsumer
from rlctl.sync.engine import EngineOptions, Member
from rlctl.sync.errors import MismatchError, PeerLostError
from tests.sync.wire_cases import assert_same, blank, hard_tensors

OPTIONS = EngineOptions(bucket_size=8192, timeout=10.0, token="naive")  # noqa: S106
Weights = dict[str, torch.Tensor]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run at once, and return the results; raise the first error."""
    return [future.result() for future in [call(c, f"call {i}") for i, c in enumerate(calls)]]


class House:
    """A trainer and two replicas in this process."""

    def __init__(self, rollouts: int = 2) -> None:
        self.trainer = NaiveEngine(Member("trainer", 0, 1), OPTIONS)
        self.rollouts = [NaiveEngine(Member("rollout", r, rollouts), OPTIONS) for r in range(rollouts)]
        self.engines = [self.trainer, *self.rollouts]

    def sync(self, source: Weights, targets: list[Weights], version: int) -> list[Any]:
        try:
            kwargs = NaiveEngine.build_topology(1, len(self.rollouts), [e.prepare() for e in self.engines])
            together(*(lambda e=e, k=k: e.init_process_group(**k) for e, k in zip(self.engines, kwargs, strict=True)))
            return together(
                *(lambda e=e, t=t: e.receive_into(version, t) for e, t in zip(self.rollouts, targets, strict=True)),
                lambda: self.trainer.send_weights(source.items(), version),
            )
        finally:
            for engine in self.engines:
                engine.finalize()


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    for engine in found.engines:
        engine.close()


def test_every_tensor_arrives_exact_three_times(house: House) -> None:
    for version in range(3):
        source, targets = hard_tensors(version), [blank(version), blank(version)]
        *reports, stats = house.sync(source, targets, version)
        assert all(report.complete for report in reports)
        assert stats.tensors == len(source)
        for target in targets:
            assert_same(source, target)
    assert isinstance(house.rollouts[0]._sources[0].consumer, DirectConsumer)


def test_shared_memory_is_not_copied(house: House) -> None:
    source = {"shared": torch.randn(1000), "own": torch.randn(1000)}
    targets = [{"shared": source["shared"].view(1000), "own": torch.zeros(1000)} for _ in range(2)]
    before = source["shared"]._version
    house.sync(source, targets, 1)
    assert_same(source, targets[1])
    assert source["shared"]._version == before
    assert targets[0]["shared"].data_ptr() == source["shared"].data_ptr()


def test_a_failure_ends_both_sides_and_the_next_sync_works() -> None:
    house = House(rollouts=1)
    with pytest.raises(MismatchError, match="is sent as"):
        house.sync({"a": torch.zeros(3)}, [{"a": torch.zeros(4)}], 1)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise RuntimeError("out of memory in layer 7")

    class Broken(dict[str, torch.Tensor]):
        def items(self) -> Any:
            return broken()

    with pytest.raises(PeerLostError, match="trainer 0 is gone"):
        house.sync(Broken(), [{"a": torch.zeros(3)}], 2)
    target = {"a": torch.zeros(3)}
    house.sync({"a": torch.ones(3)}, [target], 3)
    assert target["a"].tolist() == [1.0, 1.0, 1.0]
    for engine in house.engines:
        engine.close()
