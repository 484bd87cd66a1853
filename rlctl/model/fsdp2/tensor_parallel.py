"""Tensor parallelism of a transformers decoder: which of its matrices are cut, and along what.

Queries, keys, values, gate and up are cut by their outputs (whole heads), the matrices after them by their inputs, as
in Megatron-LM (arXiv 1909.08053, section 3). Norms, embeddings and the head stay whole on every rank of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

_OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_INPUTS = ("self_attn.o_proj", "mlp.down_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def cut_layers(layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Cut each decoder layer over ``mesh``, in place."""
    for layer in layers:
        parallelize_module(layer, mesh, _plan(dict(layer.named_modules())))


def _plan(modules: Mapping[str, nn.Module]) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    plan |= {name: ColwiseParallel() for name in _OUTPUTS}
    plan |= {name: RowwiseParallel() for name in _INPUTS}
    # A norm of each head sees this rank's heads alone, (batch, token, head, size): its gradient is summed over ranks.
    plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in _HEAD_NORMS if name in modules}
    return plan
