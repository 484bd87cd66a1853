"""Weights that go over NIXL in every way that there is."""

from __future__ import annotations

import torch

from rlctl.sync.backends.nixl import NixlEngine
from tests.sync.side import Side, Weights
from tests.sync.wire_cases import assert_same, blank, hard_tensors


def mixed(seed: int) -> Weights:
    """Small tensors among large ones, one of them larger than a bucket of 1 MiB."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"a": 300, "b": 200 << 10, "c": 5, "d": 3 << 20, "e": 700, "f": 900 << 10, "g": 129 << 10}
    return {name: torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8) for name, size in sizes.items()}


def check(engines: Side[NixlEngine], version: int) -> None:
    """Sync tensors that nobody bound."""
    targets = [blank(0) for _ in engines.rollouts]
    engines.sync(version, hard_tensors(0, version), targets)
    for target in targets:
        assert_same(hard_tensors(0, version), target)
