"""What a weight sync needs of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadReport:
    """What one weight load did.

    Attributes:
        loaded: names that were written, in the order of the stream.
        unknown: names in the stream that the model does not have.
        untouched: names of the model that the stream did not bring.
    """

    loaded: list[str]
    unknown: list[str]
    untouched: list[str]

    @property
    def complete(self) -> bool:
        """True when the stream and the model name the same weights."""
        return not self.unknown and not self.untouched


class WeightSource(Protocol):
    """The trainer's side."""

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, full tensor), one at a time."""

    def offload(self) -> None:
        """Give device memory back."""


class Replica(Protocol):
    """The rollout side."""

    replica: str

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        """Take weights in place and carry ``version`` from now on."""

    def wake(self, tags: Sequence[str]) -> None:
        """Bring back memory given up in sleep: "weights", "kv_cache"."""
