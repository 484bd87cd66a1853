"""vLLM's parameters on one rank, given the memory of what a switch brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlctl.errors import RlctlError, UnavailableError
from rlctl.keys.model_spec import ModelSpec
from rlctl.keys.schemes.hf import canonical_shapes
from rlctl.keys.schemes.vllm import vllm_layout
from rlctl.rollout.vllm.weights import weights_of


class RankParameters:
    """The parameters of one worker. Shards have their names and shapes already: query, key and value behind each
    other, cut over the replica's ranks; but for the rows that vLLM adds to the vocabulary.

    Args:
        worker: vLLM's, with its model loaded.
        rank, world: of the replica's ranks.

    Raises:
        UnavailableError: vLLM keeps the weights otherwise than they are trained (experts, quantised weights).
    """

    def __init__(self, worker: Any, rank: int, world: int) -> None:
        self._worker = worker
        model = worker.model_runner.get_model()
        way = weights_of(model, worker.vllm_config)  # checks names and shapes against the architecture
        try:
            way.held()
        except RlctlError as error:
            raise UnavailableError(
                f"vLLM keeps this model otherwise than it is trained, so none of it moves in place: {error.message}",
                where="rollout.engine",
                fix="set placement.layout=colocated, whose syncs go through vLLM's loaders",
            ) from error
        self._parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        spec = ModelSpec.from_config(worker.vllm_config.model_config.hf_config.to_dict())
        shard = f"rank_{rank}" if world > 1 else ""
        stored = vllm_layout(spec, canonical_shapes(spec), tp=world).stored
        #: Name -> rows that hold something; what lies behind them is padding.
        self._rows = {
            ref.name: max((part.at[0].stop for part in one.parts if part.at), default=0)
            for ref, one in stored.items()
            if ref.shard == shard and one.written
        }

    @property
    def nbytes(self) -> int:
        """Bytes that they take now."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def drop(self) -> None:
        """Let go of their memory; on an accelerator vLLM's sleep mode does that."""
        if self._on_cpu:
            for parameter in self._parameters.values():
                parameter.data = parameter.data.new_empty(0)

    def take(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Compute with ``shards``. On the CPU nothing is copied but what needs padding; on an accelerator, whose
        captured graphs know addresses, they are copied to where the weights were.

        Raises:
            RlctlError: names or shapes are not those of the parameters.
        """
        self._check(shards)
        for name, parameter in self._parameters.items():
            shape, rows = self._shapes[name], self._rows[name]
            if self._on_cpu and rows == shape[0]:
                parameter.data = shards[name]
                continue
            if self._on_cpu:
                parameter.data = parameter.data.new_zeros(shape)
            elif rows < shape[0]:
                parameter.data[rows:].zero_()
            if rows:
                parameter.data[:rows].copy_(shards[name])

    @property
    def _on_cpu(self) -> bool:
        return next(iter(self._parameters.values())).is_cpu

    def _check(self, shards: Mapping[str, torch.Tensor]) -> None:
        wanted = {n: (self._rows[n], *s[1:]) for n, s in self._shapes.items() if self._rows[n]}
        missing, unknown = sorted(wanted.keys() - shards.keys()), sorted(shards.keys() - self._shapes.keys())
        other = [name for name in wanted.keys() & shards.keys() if tuple(shards[name].shape) != wanted[name]]
        if missing or unknown or other:
            named = [f"{name} (missing)" for name in missing] + [f"{name} (unknown)" for name in unknown]
            named += [f"{name} ({list(shards[name].shape)}, not {list(wanted[name])})" for name in sorted(other)]
            raise RlctlError(f"{len(named)} of a rank's parts are not vLLM's parameters: {', '.join(named[:4])}")
