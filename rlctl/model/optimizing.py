"""AdamW on a module's parameters: the step, its schedule, and a state that comes back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlctl.model.schedule import learning_rate
from rlctl.schema.training import OptimizerConfig


class Optimizing:
    """One module with its optimizer. Vectors (norms, biases) take no weight decay.

    Args:
        module: whose trainable parameters are stepped.
        settings: of AdamW.
        total_updates: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, module: torch.nn.Module, settings: OptimizerConfig, total_updates: int) -> None:
        self._module = module
        self._settings = settings
        self._total_updates = total_updates
        self._updates = 0
        trainable = self._trainable().values()
        matrices = [p for p in trainable if p.ndim >= 2]
        vectors = [p for p in trainable if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._settings, self._updates, self._total_updates)

    def clear(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self) -> dict[str, float]:
        """Clip the gradients and step; return grad_norm, skipped_updates and lr.

        Gradients that are not finite are dropped: one bad batch must not destroy the weights.
        """
        rate = self.rate
        norm = self.clip(self._settings.max_grad_norm or float("inf"))
        if not np.isfinite(norm):
            self.clear()
            return {"grad_norm": norm, "skipped_updates": 1.0, "lr": rate}
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.clear()
        self._updates += 1
        return {"grad_norm": norm, "skipped_updates": 0.0, "lr": rate}

    def move(self, device: torch.device, *, params: bool = True, moments: bool = True) -> None:
        """Move parameters, moments or both to ``device``; what is there already stays."""
        if params:
            self._module.to(device)
        for kept in self._optimizer.state.values() if moments else ():
            for name in ("exp_avg", "exp_avg_sq"):
                kept[name] = kept[name].to(device)

    def state(self) -> dict[str, Any]:
        """Return the trainable parameters, their moments and the number of steps."""
        named = self._trainable()
        moments = {name: self._optimizer.state[p] for name, p in named.items() if p in self._optimizer.state}
        return {
            "updates": self._updates,
            "params": {name: p.detach() for name, p in named.items()},
            "exp_avg": {name: s["exp_avg"] for name, s in moments.items()},
            "exp_avg_sq": {name: s["exp_avg_sq"] for name, s in moments.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state()`` described. Raises ValueError when its parameters are others."""
        named = self._trainable()
        if named.keys() != state["params"].keys():
            odd = sorted(named.keys() ^ state["params"].keys())
            raise ValueError(f"checkpoint and model differ in {len(odd)} parameters, {odd[0]} first")
        for name, parameter in named.items():
            # copy_ would spread a smaller tensor over a larger one.
            if parameter.shape != state["params"][name].shape:
                shapes = f"{list(state['params'][name].shape)}, the model's is {list(parameter.shape)}"
                raise ValueError(f"checkpoint and model differ: {name} is {shapes}")
        self._updates = int(state["updates"])
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(state["params"][name])
        self._optimizer.state.clear()
        for name, moment in state["exp_avg"].items():
            parameter = named[name]
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(self._updates), device=parameter.device),
                "exp_avg": moment.to(parameter.device, copy=True),
                "exp_avg_sq": state["exp_avg_sq"][name].to(parameter.device, copy=True),
            }

    def clip(self, limit: float) -> float:
        """Scale the gradients down to a global norm of ``limit``; return the norm that they had."""
        parameters = [p for p in self._module.parameters() if p.grad is not None]
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}
