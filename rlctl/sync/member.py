"""A member that has weights of its own: what benchmarks, drills and tests are made of. See ``host``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from typing import Any

import torch

from rlctl.process import Channel
from rlctl.sync.delta import DeltaDecoder
from rlctl.sync.digest import content_digest
from rlctl.sync.engine import TransferStats
from rlctl.sync.errors import WrongBaseError
from rlctl.sync.host import EngineHost, Received, serve_host
from rlctl.sync.tensor_meta import TensorMeta

Weights = dict[str, torch.Tensor]


class MemberHost(EngineHost):
    """One member: an engine, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: Weights = {}
        self.shadow: Weights | None = None
        self.staged: int | None = None
        self.version: int | None = None

    def open(self, backend: str, role: Any, rank: int, world: int, options: Mapping[str, Any], part: int = 0) -> None:
        """See EngineHost."""
        super().open(backend, role, rank, world, options, part)
        self.shadow = None

    def load(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Take the weights that ``module:function`` makes (name -> tensor): what a trainer sends, or a rollout
        member is written into."""
        module, _, attribute = factory.partition(":")
        fresh: Weights = getattr(import_module(module), attribute)(**arguments)
        self.weights, self.shadow = fresh, None
        self.engine.bind(self._targets(fresh) if self.engine.member.role == "rollout" else self._sources(fresh))

    def adopt(self) -> None:
        """Let the weights of a trainer live where its transport can share them, if it can."""
        self.engine.adopt(self.weights)

    def send(self, version: int, base_version: int | None = None) -> TransferStats:
        """Send the weights; where layouts are declared they are this rank's shards."""
        layouts = self.engine.layouts
        if layouts is None:
            return self._send(self.weights.items(), version, base_version)
        return self._send(layouts.sources(self.engine.member.rank, self.weights), version, base_version)

    def receive(self, version: int, base_version: int | None = None, cast: bool = False) -> Received:
        """Receive into the live weights."""
        self._require_base(base_version)
        self.version = self.staged = None
        return self._receive(self.weights, version, base_version, cast)

    def stage(self, version: int, base_version: int | None = None, cast: bool = False) -> Received:
        """Receive into a shadow of the weights, which stay as they are until ``commit``."""
        self._require_base(base_version)
        if self.shadow is None:
            self.shadow = {name: torch.empty_like(tensor) for name, tensor in self.weights.items()}
            if self.engine.layouts is not None:  # no slice fills the rows behind the last word
                for name, tensor in self.shadow.items():
                    tensor.copy_(self.weights[name])
        self.staged = None
        received = self._receive(self.shadow, version, base_version, cast)
        received.stats.extra_nbytes += sum(tensor.nbytes for tensor in self.shadow.values())
        self.staged = version
        return received

    def commit(self, version: int) -> None:
        """Serve ``version`` from now on."""
        if self.staged is not None:
            assert self.shadow is not None
            assert self.staged == version
            self.weights, self.shadow, self.staged = self.shadow, self.weights, None
        self.version = version

    def served(self) -> int | None:
        """Return the version that was committed last; None when the weights are not known to be whole."""
        return self.version

    def digest(self) -> dict[str, Any]:
        """Return name -> [dtype, shape, digest of the bytes] of the weights."""
        return {n: described(n, t) for n, t in self.weights.items()}

    def _bases(self) -> dict[str, int | None]:
        if self.engine.member.role == "trainer":
            return super()._bases()
        return {"receive": self.version, "stage": self.version}

    def _sources(self, weights: Weights) -> Weights:
        """What a trainer member sends: its weights, or the slices of them that it is to."""
        layouts = self.engine.layouts
        if layouts is None:
            return weights
        streams = layouts.sources(self.engine.member.rank, weights)
        return {name: place for stream in streams.values() for name, place in stream}

    def _targets(self, weights: Weights) -> Weights:
        """Where a rollout member takes what: tensor, or slice of one -> place."""
        layouts = self.engine.layouts
        return weights if layouts is None else layouts.targets(self.engine.member.part, weights)

    def _require_base(self, base_version: int | None) -> None:
        if base_version is not None and base_version != self.version:
            raise WrongBaseError(
                f"changes against version {base_version} were to come, and version {self.version} is here"
            )

    def _receive(self, targets: Weights, version: int, base_version: int | None, cast: bool) -> Received:
        engine = self.engine
        targets = self._targets(targets)
        try:
            if engine.options.delta and base_version is not None:
                base = None if targets is self.weights else self.weights
                check = engine.options.verify == "full"
                decoder = DeltaDecoder(targets, version=version, base=base, check_bytes=check)
                # Closed at once when a delta is refused, so that the others do not wait for this member.
                with closing(engine.receive_weights(version, base_version=base_version)) as tensors:
                    report = decoder.load(tensors)
            else:
                report = engine.receive_into(version, targets, cast=cast, base_version=base_version)
        finally:
            self._end_drill()
        assert engine.summary is not None
        return Received(report, engine.stats, report.digest or engine.summary.digest, version, engine.member.part)


def serve(channel: Channel) -> None:
    """Entry point of a member process."""
    serve_host(channel, MemberHost())


def described(name: str, tensor: torch.Tensor) -> list[Any]:
    """Return [dtype code, shape, digest of the bytes] of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    meta = TensorMeta.of(name, tensor)
    return [meta.dtype, list(meta.shape), content_digest(plain.cpu().numpy())]
