"""What a trainer rank does in a weight sync: it hosts the checkpoint engine that its weights are sent through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from rlctl.model.base import ModelEngine
from rlctl.runtime.ranks.messages import Report
from rlctl.sync.calls import call
from rlctl.sync.error_data import ErrorData
from rlctl.sync.local import SourceHost
from rlctl.sync.member import described


class NotedSource:
    """A model's weights on their way, of which it can be said later what they were.

    Args:
        engine: whose weights they are.
        noted: whether they are described as they pass.
    """

    def __init__(self, engine: ModelEngine, *, noted: bool) -> None:
        self._engine = engine
        self._noted = noted
        self.sent: dict[str, list[Any]] = {}

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSource."""
        sent: dict[str, list[Any]] = {}
        for name, tensor in self._engine.per_tensor_params():
            if self._noted:
                sent[name] = described(name, tensor)
            yield name, tensor
        self.sent = sent

    def offload(self) -> None:
        """See WeightSource."""
        self._engine.offload()


class Sending:
    """A rank's place in weight syncs.

    Args:
        engine: this rank's part of the model.
        noted: whether to remember what was sent.
        device: that the rank computes on.
    """

    def __init__(self, engine: ModelEngine, *, noted: bool, device: torch.device) -> None:
        self._source = NotedSource(engine, noted=noted)
        self._host = SourceHost(self._source)
        self._device = device

    @property
    def sent(self) -> dict[str, list[Any]]:
        """What was sent last: name -> [dtype, shape, digest]; empty where it is not noted."""
        return self._source.sent

    def answer(self, number: int, command: str, arguments: Mapping[str, Any]) -> Report:
        """Run a command of ``SourceHost`` in a thread of its own, so that a signal can cancel it."""
        future = call(lambda: self._handle(command, arguments), command)
        error = future.exception()
        if error is not None:
            return Report("answer", error=ErrorData.of(error), number=number)
        return Report("answer", msgspec.to_builtins(future.result(), builtin_types=(bytes,)), number=number)

    def cancel(self) -> None:
        """Stop the transfer under way."""
        self._host.cancel()

    def _handle(self, command: str, arguments: Mapping[str, Any]) -> object:
        if self._device.type == "cuda":  # which one is current is for each thread to say
            torch.cuda.set_device(self._device)
        return self._host.handle(command, arguments)
