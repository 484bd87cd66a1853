"""What a critic does for a trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.experience.rows import Floats, Row


class Critic(ABC):
    """A value model with its optimizer; made, saved and resumed like the actor."""

    @abstractmethod
    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """Return the value of the state before each of a row's response tokens, float32."""

    @abstractmethod
    def update(self, rows: Sequence[Row], *, clip: float | None) -> dict[str, float]:
        """Take one optimizer step towards ``Row.returns`` on the trained tokens; return metrics named ``critic/*``.

        Args:
            rows: with ``values`` and ``returns``.
            clip: greatest change of a value that the loss rewards.
        """

    @abstractmethod
    def offload(self) -> None:
        """Give device memory back."""

    @abstractmethod
    def onload(self) -> None:
        """Undo ``offload``. Calling either twice is harmless."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return parameters and optimizer state."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Replace them by an earlier ``state()``, exactly."""

    @abstractmethod
    def params_digest(self) -> str:
        """Return the SHA-256 of all parameters."""
