"""The optimizer as a script sees it; its state lies where the training layout has the parameters, and stays there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlctl.model.fsdp2.optimizing import MOMENTS, ShardedOptimizing


class HybridOptimizer:
    """AdamW on this rank's parts of the parameters. All ranks call it in step.

    Args:
        optimizing: what steps.
        trains: called first; raises where the engine does not train.
    """

    def __init__(self, optimizing: ShardedOptimizing, trains: Callable[[str], None]) -> None:
        self._optimizing = optimizing
        self._trains = trains

    def step(self) -> dict[str, float]:
        """Clip the gradients by their global norm, step, and free them; return grad_norm, lr and skipped_updates.

        Raises RlctlError while the engine generates: the masters are not to change under a rollout.
        """
        self._trains("a step")
        return self._optimizing.step()

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
