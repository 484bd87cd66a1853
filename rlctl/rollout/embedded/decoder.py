"""What the engine needs of a model: weights by name, prefill of sequences, one decode tick over contiguous rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """A sequence that went through the model once, ready to be placed in any number of rows.

    Attributes:
        ids: its tokens.
        logits: [vocab] for the token after the last.
        cache: (keys, values) of each layer, in the decoder's own layout.
    """

    ids: tuple[int, ...]
    logits: Tensor
    cache: list[tuple[Tensor, Tensor]]


class Decoder(ABC):
    """A causal LM with a cache of rows 0 .. n-1, each at its own position.

    Weights and cache are allocated and freed apart; both are absent at first.

    Attributes:
        name: what a user reads in a report.
        vocab_size: number of token ids.
        lengths: [n] number of tokens in the cache of each row in use.
    """

    name: ClassVar[str]
    vocab_size: int
    lengths: npt.NDArray[np.int64]

    @abstractmethod
    def allocate_weights(self) -> None:
        """Make room for the weights; what they hold is undefined until written."""

    @abstractmethod
    def free_weights(self) -> None:
        """Drop the weights."""

    @abstractmethod
    def named_weights(self) -> dict[str, Tensor]:
        """Return name -> the live tensor to write into, one name for each weight; names as in transformers."""

    @abstractmethod
    def aliases(self) -> dict[str, str]:
        """Return second names of tied weights -> the name that ``named_weights`` has."""

    @abstractmethod
    def allocate_cache(self) -> None:
        """Make room for the cache; no row is in use."""

    @abstractmethod
    def free_cache(self) -> None:
        """Drop the cache and every row in it."""

    @abstractmethod
    def prefill(self, sequences: Sequence[tuple[int, ...]]) -> list[Prefix]:
        """Run distinct sequences through the model. A sequence's result does not depend on the others."""

    @abstractmethod
    def place(self, prefixes: Sequence[tuple[Prefix, int]]) -> None:
        """Put each prefix into the given number of new rows, one after the other, after the rows in use."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Feed one token to every row in use and return the logits after it.

        Args:
            tokens: [n] int64 on the decoder's device.

        Returns:
            [n, vocab] logits, in float32 or the decoder's dtype.
        """

    @abstractmethod
    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """Let row i be what row ``order[i]`` was; the rows from ``len(order)`` on are no longer in use."""
