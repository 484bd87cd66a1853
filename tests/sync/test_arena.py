"""Weights that live in shared memory: adopted in place, and never overwritten under a reader."""

from __future__ import annotations

import pytest
import torch

from rlctl.sync.arena import WeightArena
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import DeadlineError
from tests.sync.wire_cases import assert_same, hard_tensors


class Book:
    """Readers that say what they use."""

    def __init__(self) -> None:
        self.used: set[int] = set()

    def using(self, serial: int) -> list[str]:
        return ["rollout 0"] if serial in self.used else []

    def wait_until_free(self, serial: int, deadline: Deadline) -> None:
        raise deadline.error("rollout 0 reads both copies")


def test_adopted_tensors_keep_bits_identity_and_overlap() -> None:
    source = hard_tensors(4)
    base = torch.randn(1000)
    source |= {"left": base[:600], "right": base[400:], "again": base[:600]}
    before = {name: tensor.detach().clone() for name, tensor in source.items()}
    arena = WeightArena()
    arena.adopt(source.values())
    assert_same(before, source)
    assert arena.locate(source["parameter"]) is not None
    assert arena.locate(source["transposed"]) is None
    source["left"][500] = 7.0
    assert source["right"][100] == 7.0 == source["again"][500]
    addresses = {name: tensor.data_ptr() for name, tensor in source.items()}
    arena.adopt(source.values())
    assert addresses == {name: tensor.data_ptr() for name, tensor in source.items()}
    arena.close()
    assert source["right"][100] == 7.0


def test_a_step_leaves_what_is_read_alone_and_waits_for_a_second_reader() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    arena, book = WeightArena(), Book()
    arena.readers = book
    arena.adopt([weight])
    spot = arena.locate(weight)
    assert spot is not None
    first, read = spot.block.current, spot.block.current.data[:400].view(torch.float32)
    arena.begin_step(Deadline(1))
    weight.data.fill_(2.0)
    assert read.tolist() == [2.0] * 100  # nobody reads it: in place
    book.used = {first.serial}
    arena.begin_step(Deadline(1))
    weight.data.fill_(3.0)
    second = spot.block.current
    assert second.serial != first.serial
    assert read.tolist() == [2.0] * 100
    assert second.data[:400].view(torch.float32).tolist() == [3.0] * 100
    assert arena.nbytes == spot.block.nbytes
    book.used = {first.serial, second.serial}
    with pytest.raises(DeadlineError, match="rollout 0 reads both"):
        arena.begin_step(Deadline(0.1))
    book.used = {second.serial}
    arena.begin_step(Deadline(1))
    weight.data.fill_(4.0)
    assert spot.block.current is first
    assert second.data[:400].view(torch.float32).tolist() == [3.0] * 100
    arena.close()
