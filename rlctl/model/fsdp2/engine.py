"""FSDP2, alone or over tensor parallelism: every rank holds a part of the parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlctl.experience.rows import Floats, Row
from rlctl.model.accumulating import accumulate
from rlctl.model.base import LossSpec, ModelEngine, UpdateResult
from rlctl.model.digest import ordered_digest
from rlctl.model.fsdp2.dealing import DealtPasses
from rlctl.model.fsdp2.differentiable import differentiable_loss
from rlctl.model.fsdp2.optimizing import MOMENTS, ShardedOptimizing
from rlctl.model.fsdp2.sharding import gathered_no_more, shard
from rlctl.model.fsdp2.shards import DATA, TENSOR
from rlctl.model.kept import KeptParameters
from rlctl.model.memory_settings import NOTHING_SAVED, Memory
from rlctl.model.parking import Parking
from rlctl.model.passes import DTYPES
from rlctl.schema.training import OptimizerConfig

PARAMS = "params"


class Fsdp2Engine(ModelEngine):
    """One rank of the model; ``torch.distributed`` has been set up, and all ranks call every method in lockstep.

    All are given the same rows, of which each trains its share, and all get the same results. Decoder layers are
    gathered one at a time. With ``tp`` above 1 the mesh has two dimensions, ``fsdp`` x ``tp``: ranks of a tensor
    parallel group are neighbours and train the same rows.

    Args:
        model: a transformers causal LM in float32; only rank 0's needs values, it may be on the meta device elsewhere.
        optimizer: AdamW's settings.
        tp: size of the tensor-parallel groups; divides the number of ranks.
        on_pass: called when a forward, or forward and backward, pass begins.
        dtype, micro_batch_tokens, total_updates, device, memory: see ``ModelEngine``; parameters are gathered in
            the element type of passes.

    Raises:
        UsageError: the model cannot be cut into ``tp`` parts.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerConfig,
        *,
        dtype: str = "float32",
        micro_batch_tokens: int = 8192,
        total_updates: int = 1,
        device: torch.device | str = "cpu",
        memory: Memory = NOTHING_SAVED,
        tp: int = 1,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = torch.device(device)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=(DATA, TENSOR))
        self._root, self.shards = shard(
            model,
            mesh,
            activation_dtype=DTYPES[memory.activation_dtype or dtype],
            checkpointing=memory.gradient_checkpointing,
            device=self.device,
            change=self._adapt,
        )
        self.model = self._root.model
        self._generation = getattr(model, "generation_config", None)
        self._passes = DealtPasses(
            dtype=dtype,
            micro_batch_tokens=micro_batch_tokens,
            pad_id=model.config.pad_token_id or 0,
            device=self.device,
            group=mesh.get_group(DATA),
            rank=self.shards.rank,
            size=self.shards.size,
            on_pass=on_pass,
        )
        self._optimizing = ShardedOptimizing(self.model, self.shards, optimizer, total_updates)
        self._memory = memory
        self._parking = Parking()
        self._kept = KeptParameters()

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        values = self._passes.each_token(rows, lambda batch: self._root(batch, temperature, False)[0])
        gathered_no_more(self._root)  # what lies outside of the layers stays gathered otherwise
        return values

    def keep_policy(self) -> None:
        self._kept.keep(self._trained())

    def kept_log_probs(self, rows: Sequence[Row], *, temperature: float) -> list[Floats]:
        with self._kept.in_place(self._trained()):
            return self.log_probs(rows, temperature=temperature)

    def update(self, rows: Sequence[Row], loss: LossSpec) -> UpdateResult:
        self._optimizing.clear()
        metrics, logprobs = self.accumulate(rows, loss)
        tokens = sum(row.length for row in rows)
        return UpdateResult(metrics | self._optimizing.step(), logprobs, tokens, self._passes.shares())

    def accumulate(self, rows: Sequence[Row], loss: LossSpec) -> tuple[dict[str, float], list[Floats]]:
        """Add a mini batch's gradient to the parameters' gradients; return metrics and log-probs as in ``update``."""
        found = accumulate(self._root, self._passes, rows, loss)
        gathered_no_more(self._root)
        return found

    def loss(self, rows: Sequence[Row], loss: LossSpec) -> torch.Tensor:
        """Return the loss of ``rows``, whose ``backward`` adds its gradient; see ``differentiable_loss``."""
        return differentiable_loss(self._root, self._passes, rows, loss)

    def release(self) -> None:
        """Free the gradients, and what is still gathered of the model."""
        self._optimizing.clear()
        gathered_no_more(self._root)

    @property
    def optimizing(self) -> ShardedOptimizing:
        """AdamW on this rank's parts."""
        return self._optimizing

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.shards.names():
            yield name, self._whole(name, self.shards.local(name), self._passes.dtype)

    def local_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, this rank's shard), in the rollout's dtype: nothing is gathered. The layout is
        ``sync.layout.ParallelLayout.fsdp(ranks // tp, tp=tp, whole_vocab=True)``."""
        for name in self.shards.names():
            yield name, self._parking.values(self.shards.local(name)).to(self._passes.dtype)

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, this rank's shard in float32), cut as ``local_params`` says."""
        for name in self.shards.names():
            yield name, self._parking.values(self.shards.local(name))

    def offload(self) -> None:
        self._move(generating=True)

    def onload(self) -> None:
        self._move(generating=False)

    def state(self) -> dict[str, Any]:
        """Return the whole state, as one process would, on every rank; ``tensors`` gives it piece by piece."""
        state: dict[str, Any] = {"updates": self.updates, PARAMS: {}, **{moment: {} for moment in MOMENTS}}
        for kind, name, tensor in self.tensors():
            state[kind][name] = tensor
        return state

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (params, exp_avg or exp_avg_sq; parameter; whole float32 tensor), one at a time."""
        for name in self.shards.trained():
            yield PARAMS, name, self._whole(name, self.shards.local(name))
        for moment, name, part in self._optimizing.moments():
            yield moment, name, self._whole(name, part)

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""
        return self._optimizing.updates

    def load(self, state: Mapping[str, Any]) -> None:
        kinds = (PARAMS, *MOMENTS)
        given = [(kind, name, tensor) for kind in kinds for name, tensor in state[kind].items()]
        self.load_tensors(int(state["updates"]), [(kind, name) for kind, name, _ in given], (t for *_, t in given))

    def load_tensors(
        self, updates: int, names: Sequence[tuple[str, str]], tensors: Iterator[torch.Tensor] | None
    ) -> None:
        """Become what ``tensors`` described, which any number of ranks, or one process, may have given.

        Args:
            updates: optimizer steps taken.
            names: (kind, parameter) of each tensor, in order.
            tensors: whole, taken one at a time; only rank 0's are looked at.

        Raises:
            ValueError: they belong to other parameters.
        """
        params = [name for kind, name in names if kind == PARAMS]
        if set(params) != set(self.shards.trained()):
            odd = sorted(set(params) ^ set(self.shards.trained()))
            raise ValueError(f"checkpoint and model differ in {len(odd)} parameters, {odd[0]} first")
        self.onload()
        moments: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in MOMENTS}
        for kind, name in names:
            part = self.shards.scatter(name, next(tensors) if tensors is not None else None)
            if kind == PARAMS:
                with torch.no_grad():
                    self.shards.local(name).copy_(part)
            else:
                moments[kind][name] = part
        self._optimizing.load_moments(updates, moments)

    def save_pretrained(self, folder: Path) -> None:
        """Write the whole model; rank 0 gathers it in host memory, tensor by tensor."""
        whole: dict[str, torch.Tensor] = {}
        for name in self.shards.names():
            tensor = self._whole(name, self.shards.local(name))
            if dist.get_rank() == 0:
                whole[name] = tensor.cpu()
        if dist.get_rank() == 0:
            self.model.generation_config = self._generation
            self.model.save_pretrained(folder, state_dict=whole)

    def params_digest(self) -> str:
        names = sorted(self.shards.names())
        return ordered_digest((name, self._whole(name, self.shards.local(name))) for name in names)

    def _trained(self) -> Iterator[torch.Tensor]:
        return (self.shards.local(name) for name in self.shards.trained())

    def _adapt(self, twin: Any) -> None:
        """Make of the model's twin, which is on the meta device, what the model is."""

    def _whole(self, name: str, part: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor of which ``part`` is here, cast before it travels."""
        values = self._parking.values(part)
        return self.shards.gather(name, values if dtype is None else values.to(dtype))

    def _move(self, *, generating: bool) -> None:
        """Bring what is trained to where the coming phase wants it."""
        self._optimizing.clear()
        if not generating:
            self._parking.restore()
            return
        if self._memory.offload_params:
            self._parking.park(self.shards.locals())
        if self._memory.offload_optimizer:
            self._parking.park(part for *_, part in self._optimizing.moments())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
