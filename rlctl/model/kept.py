"""A copy of trained parameters, put in their place for as long as somebody asks what that policy would say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class KeptParameters:
    """Copies in host memory. Until ``keep`` was called there are none."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] | None = None

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy ``tensors`` as they are now, in place of an earlier copy."""
        self._kept = [_copy(tensor) for tensor in tensors]

    @contextmanager
    def in_place(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let ``tensors`` (the same, in the same order) hold what was kept; at the end they are what they were, bit
        for bit."""
        assert self._kept is not None, "nothing was kept"
        live = list(tensors)
        current = [_copy(tensor) for tensor in live]
        try:
            _fill(live, self._kept)
            yield
        finally:
            _fill(live, current)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _fill(live: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(live, values, strict=True):
            tensor.copy_(value)
