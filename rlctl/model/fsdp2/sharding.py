"""From a transformers model to one that is spread over ranks; no rank but the first ever holds all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlctl.model.accumulating import Scores
from rlctl.model.forward import response_scores
from rlctl.model.fsdp2.shards import DATA, TENSOR, Shards
from rlctl.model.fsdp2.tensor_parallel import cut_layers
from rlctl.model.fsdp2.tensor_sizes import check_tensor_parallel
from rlctl.model.micro_batches import MicroBatch
from rlctl.model_making import ONE_AT_A_TIME


class Scoring(torch.nn.Module):
    """A whole pass as one module: the embedding, the last norm and the head are gathered for its time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float, entropy: bool) -> Scores:
        """See ``response_scores``."""
        return response_scores(self.model, batch, temperature=temperature, entropy=entropy)


def shard(
    model: Any,
    mesh: DeviceMesh,
    *,
    activation_dtype: torch.dtype,
    checkpointing: bool,
    device: torch.device,
    change: Callable[[Any], object] = lambda _: None,
) -> tuple[Scoring, Shards]:
    """Return ``model`` spread over ``mesh``, with the values that it has on rank 0.

    Args:
        model: float32, with values on rank 0; on other ranks it may be on the meta device.
        mesh: dimensions ``fsdp`` and ``tp``.
        activation_dtype: parameters are gathered, and passes computed, in it; gradients are summed in float32.
        checkpointing: activations within a decoder layer are computed again in the backward pass.
        device: where the parts live.
        change: makes of a model of ``model``'s class and configuration, on the meta device, what ``model`` is.

    Raises:
        UsageError: tensor parallelism does not fit the model.
    """
    check_tensor_parallel(model.config.to_dict(), mesh.size(1))
    with ONE_AT_A_TIME, torch.device("meta"):
        twin = type(model)(model.config).to(torch.float32).train()
        change(twin)
    if checkpointing:
        twin.gradient_checkpointing_enable({"use_reentrant": False})
    layers = _layers(twin)
    if mesh.size(1) > 1:
        cut_layers(layers, mesh[TENSOR])
    policy = MixedPrecisionPolicy()
    if activation_dtype is not torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=activation_dtype, reduce_dtype=torch.float32)
    root = Scoring(twin)
    for module in (*layers, root):
        sharded: FSDPModule = fully_shard(module, mesh=mesh[DATA], mp_policy=policy)
        # A token's weight is its share of the whole mini batch, so gradients of ranks are added, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    root.to_empty(device=device)
    shards = Shards(dict(twin.named_parameters()), mesh)
    _fill(model, twin, shards)
    return root, shards


def gathered_no_more(root: Scoring) -> None:
    """Give back what of the model is gathered."""
    assert isinstance(root, FSDPModule)
    root.reshard()


def _layers(model: Any) -> torch.nn.ModuleList:
    """Return the decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    layers = next(lists, None)
    assert layers is not None, f"{type(model).__name__} has no list of {count} layers"
    return layers


def _fill(source: Any, twin: Any, shards: Shards) -> None:
    """Give the parts, and the buffers that every rank has, rank 0's values."""
    first = dist.get_rank() == 0
    given = dict(source.named_parameters()) if first else {}
    with torch.no_grad():
        for name in shards.names():
            shards.local(name).copy_(shards.scatter(name, given.get(name)))
        buffers = dict(source.named_buffers()) if first else {}
        for name, buffer in twin.named_buffers():
            if first:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, 0)
