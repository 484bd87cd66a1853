"""Memory that stays mapped: never given to two, and the system's when it needs it."""

import gc
import random

import pytest
import torch

from rlctl.hybrid.reshard.idle_memory import IdleMemory


def test_what_is_in_use_is_never_given_again():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    idle, held = IdleMemory(), {}
    for number in range(300):
        for name in [name for name in held if dice.random() < 0.4]:
            del held[name]
        if dice.random() < 0.3:
            idle.rest()
        part = idle.take(dice.randrange(1, 1 << 20))
        view = part[dice.randrange(part.numel()) :] if dice.random() < 0.5 else part.view(torch.uint8)
        del part  # a view of it, of other sizes, keeps it
        held[number] = view.fill_(number % 251)
        assert all(bool((view == name % 251).all()) for name, view in held.items())


def test_what_nobody_has_is_used_again_without_a_new_mapping():
    idle = IdleMemory()
    first = idle.take(8 << 20).fill_(1)
    address = first.data_ptr()
    second = idle.take(8 << 20)
    assert second.data_ptr() != address
    del first
    gc.collect()
    idle.rest()  # the second is its user's own from now on
    assert idle.take(4 << 20).data_ptr() == address
    del second
    assert len(idle._mappings) == 1


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_any_size_is_given(nbytes):
    assert IdleMemory().take(nbytes).numel() == nbytes
