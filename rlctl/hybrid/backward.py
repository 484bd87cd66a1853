"""The backward pass of a loss, of which the caller's script decides the moment, in a context of the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Within = Callable[[], AbstractContextManager[None]]


def backward_within(loss: torch.Tensor, within: Within) -> torch.Tensor:
    """Return a tensor like ``loss`` whose backward pass is done in ``within()``.

    Whatever is computed from it has the same gradients, and its backward pass raises what ``within()`` raises, by
    whichever call it is begun. What a script sees is a plain tensor whose graph is one node. As far as that node the
    pass is the script's; there a pass of its own goes through the graph of ``loss``, for one such tensor after the
    other, and adds to the leaves' gradients as always. ``torch.autograd.grad`` does not see those leaves.

    Args:
        loss: any tensor; one without a graph is returned as it is.
        within: makes the context of one pass.
    """
    if not loss.requires_grad:
        return loss
    value = loss.detach().requires_grad_()
    passed: torch.Tensor = _Border.apply(value, _Inside(loss, within))
    return passed


@dataclass(frozen=True)
class _Inside:
    """What lies behind the border. Autograd does not look for tensors in here: the two graphs stay apart."""

    loss: torch.Tensor
    within: Within


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, inside: _Inside) -> torch.Tensor:
        ctx.inside = inside
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        inside: _Inside = ctx.inside
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - retain_graph has no public name
        with inside.within():
            torch.autograd.backward(inside.loss, gradient, retain_graph=keep)
        return None, None
