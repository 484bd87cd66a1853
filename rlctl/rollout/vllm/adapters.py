"""A running vLLM engine that is sent LoRA adapters in memory, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from rlctl.errors import RlctlError, UsageError
from rlctl.keys.lora.config import AdapterConfig
from rlctl.rollout.vllm.handles import EngineHandle
from rlctl.rollout.vllm.names import ADAPTER, ADAPTER_ID
from rlctl.sync.deadline import Deadline
from rlctl.sync.protocols import Interruption, LoadReport


class VllmAdapters:
    """vLLM's own LoRA layers compute with the adapter; the base that the engine was loaded with stays as it is.

    Args:
        handle: an engine made with ``enable_lora=True`` and a ``max_lora_rank`` that is high enough.
        replica: its name.
        config: of the adapters that will come.
    """

    def __init__(self, handle: EngineHandle, replica: str, config: AdapterConfig) -> None:
        self._handle = handle
        self._config = json.dumps(config.to_dict()).encode()
        self.replica = replica
        self.version: int | None = None

    @property
    def request(self) -> Any:
        """The ``LoRARequest`` to generate with. Raises RlctlError while there is no adapter."""
        from vllm.lora.request import LoRARequest

        if self.version is None:
            raise RlctlError(f"replica {self.replica} has no adapter", fix="send one by load_adapter")
        return LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER)

    def load_adapter(
        self,
        stream: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        timeout: float = 60.0,
        interruption: Interruption = "keep",
    ) -> LoadReport:
        """Compute with another adapter from the next token on.

        Requests are interrupted as asked; keys and values of the old adapter are dropped, and what runs is computed
        again from its tokens.

        Args:
            stream: (name in a PEFT file, tensor), the whole adapter.
            version: that outputs carry from now on.
            timeout: deadline of all of it, seconds.
            interruption: what becomes of requests that run.

        Raises:
            UsageError: the adapter does not fit; the engine goes on with what it had.
            RlctlError: anything else; the engine computes nothing until an update has succeeded.
        """
        data = save({name: tensor.detach().to("cpu").contiguous() for name, tensor in stream})
        deadline = Deadline(timeout)
        try:
            self._handle.pause(interruption, deadline)
            answers = self._handle.call("rlctl_load_adapter", (self._config, data, version), deadline)
            report = _same([msgspec.convert(answer, LoadReport) for answer in answers])
            if report.unknown:
                raise UsageError(
                    f"vLLM adapts no such module: {', '.join(report.unknown[:4])}",
                    fix="leave it out of model.lora.target_modules, or sync merged weights",
                )
        except BaseException:
            self._go_on(deadline)
            raise
        self.version = None
        self._handle.drop_cache(deadline)
        self._handle.resume(version, deadline)
        self.version = version
        return report

    def _go_on(self, deadline: Deadline) -> None:
        """Serve again after an update that failed, if every worker still has the adapter of before."""
        before = self.version
        try:
            held = self._handle.call("rlctl_adapter_version", (), deadline)
        except RlctlError:  # it does not answer, so it may hold anything
            held = []
        if held and held == [before] * len(held):
            self._handle.resume(before or 0, deadline)
        else:
            self.version = None
            self._handle.hold()


def _same(reports: list[LoadReport]) -> LoadReport:
    """Return what the workers, which are all sent the same, report."""
    assert all(report == reports[0] for report in reports)
    return reports[0]
