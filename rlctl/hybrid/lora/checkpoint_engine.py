"""The checkpoint engine of devices that train an adapter and generate with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlctl.errors import RlctlError
from rlctl.hybrid.checkpoint_engine import ReshardEngine
from rlctl.hybrid.lora.parts import adapter_names
from rlctl.hybrid.lora.switching import AdapterResharder
from rlctl.keys.lora.contents import LoraModule
from rlctl.sync.engine import EngineOptions, Member, Stream, TransferStats


class AdapterReshardEngine(ReshardEngine):
    """``ReshardEngine`` whose base comes once, and whose ``shards`` have the adapter in them.

    Args:
        member, options: see ``ReshardEngine``; the weights of ``options.layouts`` are the model's and the adapter's.
        modules: the adapted layers.
        keeps, parked: see ``AdapterResharder``.
    """

    def __init__(
        self, member: Member, options: EngineOptions, *, modules: Sequence[LoraModule], keeps: bool, parked: bool
    ) -> None:
        super().__init__(member, options)
        self._modules, self._keeps, self._parked = modules, keeps, parked
        self._everything = self._outgoing, self._incoming
        self._own_names = set(adapter_names(modules))
        self._adapters: AdapterResharder | None = None

    def init_process_group(self, **kwargs: object) -> None:
        """See CheckpointEngine."""
        assert not kwargs
        if self._adapters is None:
            self._adapters = AdapterResharder(
                self.plan,
                self._modules,
                self._group,
                deadline=self.options.timeout,
                keeps=self._keeps,
                parked=self._parked,
                bucket_nbytes=self.options.bucket_size,
            )

    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """See ReshardEngine: what comes, with the base or without, is compared as it came, then added up."""
        assert self._adapters is not None
        try:
            stats = super().send_weights(stream, version, base_version=base_version)
        except RlctlError:
            self._adapters.forget()
            raise
        self.shards = self._adapters.summed()
        return stats

    def bring(self, held: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
        """Return the generation shards that this rank lacked, base and adapter apart."""
        assert self._adapters is not None
        (outgoing, incoming), alone = self._everything, self._adapters.holds_base
        self._outgoing = [(t, dtype) for t, dtype in outgoing if not alone or t.tensor in self._own_names]
        self._incoming = [t for t in incoming if not alone or t.tensor in self._own_names]
        brought = self._adapters.bring(held, version=version)
        self.report = brought.report
        return brought.shards

    def release(self) -> None:
        """See ReshardEngine: what is kept of the base stays."""
        super().release()
        if self._adapters is not None:
            self._adapters.to_training()

    def close(self) -> None:
        """See ReshardEngine."""
        super().close()
        self._adapters = None
