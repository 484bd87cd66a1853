"""What a trainer rank does in a weight sync: it hosts the checkpoint engine that its weights are sent through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
import torch

from rlctl.keys.lora.names import Part, parse_key
from rlctl.model.base import ModelEngine
from rlctl.runtime.ranks.messages import Report
from rlctl.sync.calls import call, error_of
from rlctl.sync.error_data import ErrorData
from rlctl.sync.local import SourceHost
from rlctl.sync.member import described


class Adapting(Protocol):
    """An engine that trains an adapter."""

    def base_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model without the adapter."""

    def adapter_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter alone."""


class NotedSource:
    """A model's weights on their way, of which it can be said later what they were.

    Args:
        engine: whose weights they are.
        noted: whether they are described as they pass.
        adapter: the same engine, when its adapter is sent alone; None sends whole weights.
        held: the rollouts' dtype, in which they hold the float32 base of an adapter that is sent alone.

    Attributes:
        with_base: an adapter goes out behind its base.
    """

    def __init__(
        self,
        engine: ModelEngine,
        *,
        noted: bool,
        adapter: Adapting | None = None,
        held: torch.dtype = torch.float32,
    ) -> None:
        self._held = held
        self._engine = engine
        self._noted = noted
        self._adapter = adapter
        self.with_base = True
        self.sent: dict[str, list[Any]] = {}

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSource."""
        sent: dict[str, list[Any]] = {}
        for name, tensor in self._stream():
            if self._noted:
                base = self._adapter is not None and parse_key(name).part is Part.BASE
                sent[name] = described(name, tensor.to(self._held) if base else tensor)
            yield name, tensor
        self.sent = sent

    def offload(self) -> None:
        """See WeightSource."""
        self._engine.offload()

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapter is None:
            yield from self._engine.per_tensor_params()
            return
        if self.with_base:
            yield from self._adapter.base_params()
        yield from self._adapter.adapter_params()


class Sending:
    """A rank's place in weight syncs.

    Args:
        engine: this rank's part of the model.
        noted: whether to remember what was sent.
        device: that the rank computes on.
        adapter, held: see ``NotedSource``.
    """

    def __init__(
        self,
        engine: ModelEngine,
        *,
        noted: bool,
        device: torch.device,
        adapter: Adapting | None = None,
        held: torch.dtype = torch.float32,
    ) -> None:
        self._source = NotedSource(engine, noted=noted, adapter=adapter, held=held)
        self._host = SourceHost(self._source)
        self._device = device

    @property
    def sent(self) -> dict[str, list[Any]]:
        """What was sent last: name -> [dtype, shape, digest]; empty where it is not noted."""
        return self._source.sent

    def send_base(self, with_base: bool) -> None:
        """From now on adapters go out behind their base, or without it."""
        self._source.with_base = with_base

    def answer(self, number: int, command: str, arguments: Mapping[str, Any]) -> Report:
        """Run a command of ``SourceHost`` in a thread of its own, so that a signal can cancel it."""
        future = call(lambda: self._handle(command, arguments), command)
        error = error_of(future)
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
