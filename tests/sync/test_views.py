"""Weights that receivers read where they lie: never torn, never copied while their sender knows who reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.sync.backends.ipc import IpcEngine
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError, TransferError
from rlctl.sync.registry import CHECKPOINT_ENGINES
from tests.sync.side import Side, Weights, side, together
from tests.sync.wire_cases import assert_same


def weights(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(300, 70, generator=g),
        "half": torch.randn(4097, generator=g).bfloat16(),
        "bytes": torch.randint(0, 256, (3, 5), generator=g, dtype=torch.uint8),
        "none": torch.zeros(0, 7),
        "one": torch.randn((), generator=g, dtype=torch.float64),
    }


def map_all(engines: Side[IpcEngine], version: int, source: Weights) -> list[Weights]:
    engines.meet()
    found = together(
        *(lambda e=e: e.send_weights(source.items(), version) for e in engines.trainers),
        *(lambda e=e: dict(e.map_weights(version)) for e in engines.rollouts),
    )
    for engine in engines.all:
        engine.finalize()
    return found[len(engines.trainers) :]


def bits(tensors: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "copied"])
def test_what_is_read_stays_while_its_sender_goes_on(verify: str, adopted: bool) -> None:
    source = weights(0)
    with side(IpcEngine, 1, 2, verify=verify, extras={"way": "mapped"}) as engines:
        (trainer,) = engines.trainers
        if adopted:
            trainer.adopt(source)
        addresses = set()
        for version in range(5):
            views = map_all(engines, version, source)
            for view in views:
                assert_same(source, view)
                addresses |= {tensor.data_ptr() for tensor in view.values() if tensor.numel()}
            before = [bits(view) for view in views]
            trainer.arena.begin_step(Deadline(5))
            for name, fresh in weights(version + 1).items():
                source[name].data.copy_(fresh)
            for view, was in zip(views, before, strict=True):
                assert_same(was, view)
        large = sum(tensor.numel() > 0 for tensor in source.values())
        assert len(addresses) <= 4 * large, "there are two segments, mapped by two receivers"


def test_what_was_let_go_needs_no_second_copy() -> None:
    source = {"w": torch.arange(100_000)}
    with side(IpcEngine, 1, 1) as engines:
        (trainer,), (reader,) = engines.trainers, engines.rollouts
        trainer.adopt(source)
        for version in range(3):
            (view,) = map_all(engines, version, source)
            assert_same(source, view)
            reader.release_weights()
            trainer.arena.begin_step(Deadline(5))
            source["w"].add_(1)
            assert trainer.arena.nbytes == 0
        (view,) = map_all(engines, 3, source)
        trainer.arena.begin_step(Deadline(5))
        assert trainer.arena.nbytes >= source["w"].nbytes


def test_a_sender_waits_for_who_reads_both_copies() -> None:
    source = {"w": torch.arange(1000)}
    with side(IpcEngine, 1, 2) as engines:
        trainer = engines.trainers[0]
        trainer.adopt(source)
        map_all(engines, 0, source)
        slow = engines.rollouts[1]
        trainer.arena.begin_step(Deadline(5))
        old = slow._views._kept
        slow._views._kept = ()  # it has not let go yet
        map_all(engines, 1, source)
        with pytest.raises(DeadlineError, match="rollout 1 reads both"):
            trainer.arena.begin_step(Deadline(0.1))
        old[0].release(Deadline(1))
        trainer.arena.begin_step(Deadline(5))


def test_who_is_cut_off_reads_a_copy_of_its_own() -> None:
    source = {f"w{n}": torch.full((5000,), n) for n in range(4)}
    with side(IpcEngine, 1, 2) as engines:
        trainer = engines.trainers[0]
        trainer.adopt(source)
        views = map_all(engines, 0, source)
        was = bits(source)
        # The next sync does not come to its end: the sender fails in its middle.
        engines.meet()

        def failing() -> None:
            def stream() -> Iterator[tuple[str, torch.Tensor]]:
                yield "w0", source["w0"]
                raise RuntimeError("the trainer's gather failed")

            with pytest.raises(RuntimeError, match="gather failed"):
                trainer.send_weights(stream(), 1)
            trainer.cancel()
            trainer.finalize()

        def failed(reader: IpcEngine) -> None:
            with pytest.raises(TransferError):
                reader.map_weights(1)

        together(failing, *(lambda e=e: failed(e) for e in engines.rollouts))
        for engine in engines.rollouts:
            engine.finalize()
        for tensor in source.values():  # in place: the sender knows of no reader
            tensor.fill_(-1)
        for view in views:
            assert_same(was, view)
        for view in map_all(engines, 2, source):
            assert_same(source, view)


def test_memory_that_is_used_again_at_once_is_not_read_where_it_lies() -> None:
    source = {"w": torch.arange(1000)}
    with side(IpcEngine, 1, 1, extras={"way": "ring"}) as engines:
        engines.meet()

        def reading() -> None:
            with pytest.raises(UsageError, match="through a ring"):
                engines.rollouts[0].map_weights(0)
            engines.rollouts[0].finalize()

        def sending() -> None:
            with pytest.raises(TransferError):
                engines.trainers[0].send_weights(source.items(), 0)
            engines.trainers[0].finalize()

        together(reading, sending)


@pytest.mark.parametrize("name", ["gloo", "kimi", "file"])
def test_transports_that_share_no_memory_say_so(name: str) -> None:
    with side(CHECKPOINT_ENGINES.load(name), 1, 1) as engines, pytest.raises(UsageError, match="shares no memory"):
        engines.rollouts[0].map_weights(0)
