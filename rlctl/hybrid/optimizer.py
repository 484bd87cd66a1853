"""The optimizer as a script sees it; its state lies where the training layout has the parameters, and stays there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from rlctl.model.fsdp2.optimizing import MOMENTS, ShardedOptimizing


class HybridOptimizer:
    """AdamW on this rank's parts of the parameters. All ranks call it in step.

    Args:
        optimizing: what steps.
        trains: called first; raises where the engine does not train.
        together: context of what all ranks do together, by its phase; names the rank that holds it up.
    """

    def __init__(
        self,
        optimizing: ShardedOptimizing,
        trains: Callable[[str], None],
        together: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._optimizing = optimizing
        self._trains = trains
        self._together = together

    def step(self) -> dict[str, float]:
        """Clip the gradients by their global norm, step, and free them; return grad_norm, lr and skipped_updates.

        Raises:
            RlctlError: the engine generates, and the masters are not to change under a rollout; or a rank is dead or
                stuck, which is named with its phase. Then no parameter has changed.
        """
        self._trains("a step")
        with self._together("optimizer step"):
            return self._optimizing.step()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients down to a global norm of ``max_norm``, for an optimizer of the script's own; return the
        norm that they had. ``step`` clips by itself. Raises as ``step``."""
        self._trains("clipping")
        with self._together("clipping"):
            return self._optimizing.clip(max_norm)

    def zero_grad(self) -> None:
        """Free the gradients; ``step`` does so too."""
        self._optimizing.clear()

    @property
    def updates(self) -> int:
        """Steps taken."""
        return self._optimizing.updates

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: ``updates``, and ``exp_avg`` and ``exp_avg_sq`` by parameter, as they lie here."""
        state: dict[str, Any] = {"updates": self.updates, **{moment: {} for moment in MOMENTS}}
        for moment, name, part in self._optimizing.moments():
            state[moment][name] = part
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what a rank of the same layout was, exactly."""
        self._trains("loading the optimizer's state")
        moments: Mapping[str, Mapping[str, torch.Tensor]] = {moment: state[moment] for moment in MOMENTS}
        self._optimizing.load_moments(int(state["updates"]), moments)
