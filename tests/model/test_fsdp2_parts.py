"""What FSDP2 ranks stand on, without ranks: sizes, the dealing of rows, and parked tensors."""

from __future__ import annotations

import random

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.model.fsdp2.dealing import deal
from rlctl.model.fsdp2.tensor_sizes import check_tensor_parallel
from rlctl.model.parking import Parking
from tests.model.fsdp2_families import EXPERTS
from tests.model.tiny import CONFIGS


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(UsageError, match="3 does not divide the model's 4 attention heads and 2 key-value heads") as e:
        check_tensor_parallel(CONFIGS["llama-tied"].to_dict(), 3)
    assert "valid for this model: 1, 2" in str(e.value)
    with pytest.raises(UsageError, match="not of gpt2"):
        check_tensor_parallel(CONFIGS["gpt2"].to_dict(), 2)
    with pytest.raises(UsageError, match="not of qwen3_moe"):
        check_tensor_parallel(EXPERTS.to_dict(), 2)
    check_tensor_parallel(CONFIGS["gpt2"].to_dict(), 1)
    check_tensor_parallel(CONFIGS["qwen2-untied"].to_dict(), 2)


def test_rows_are_dealt_evenly(seed):
    for _ in range(50):
        lengths = [random.randint(1, 300) for _ in range(random.randint(1, 60))]
        size = random.randint(1, 8)
        hands = deal(lengths, size)
        assert sorted(i for hand in hands for i in hand) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in hand) for hand in hands]
        assert max(loads) - min(loads) <= max(lengths)


def test_parked_tensors_are_empty_and_come_back(seed):
    base = torch.randn(3, 5)
    view, scalar, other = base[1:, :], torch.tensor(2.5), torch.zeros(0)
    before, parking = base.clone(), Parking()
    parking.park([view, base, scalar, other])
    parking.park([base])
    assert base.untyped_storage().nbytes() == scalar.untyped_storage().nbytes() == 0
    assert torch.equal(parking.values(view), before[1:]) and float(parking.values(scalar)) == 2.5
    parking.restore()
    parking.restore()
    assert torch.equal(base, before) and torch.equal(view, before[1:]) and float(scalar) == 2.5
