"""A process that hosts one member of a sync and obeys messages: what benchmarks, drills and tests are made of.

``serve`` is its entry point (see ``rlctl.process.start``). A message is ``[number, command, arguments]``, the
answer ``[number, result, error]``. Commands run one at a time in a thread of their own, while the main thread
stays ready for SIGUSR1, which cancels the transfer under way.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import msgspec
import torch

from rlctl.process import Channel
from rlctl.sync.calls import call
from rlctl.sync.digest import content_digest
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member, TransferStats
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import WrongBaseError
from rlctl.sync.faults import Drill, Fault
from rlctl.sync.protocols import LoadReport
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.tensor_meta import TensorMeta

Weights = dict[str, torch.Tensor]


class Received(msgspec.Struct):
    """What a rollout member got.

    Attributes:
        report: names loaded, unknown, untouched.
        stats: of the transfer.
        digest: of the whole sync (16 bytes; equal on every member that got the same).
        version: that was received.
    """

    report: LoadReport
    stats: TransferStats
    digest: bytes
    version: int


class MemberHost:
    """One member: an engine, and weights of its own."""

    def __init__(self) -> None:
        self._engine: CheckpointEngine | None = None
        self.weights: Weights = {}
        self.shadow: Weights | None = None
        self.staged: int | None = None
        self.version: int | None = None
        self.drill: Drill | None = None

    def handle(self, command: str, arguments: Mapping[str, Any]) -> object:
        """Run one command: a public method of this class."""
        method: Callable[..., object] = getattr(self, command)
        return method(**arguments)

    def open(self, backend: str, role: Any, rank: int, world: int, options: Mapping[str, Any]) -> None:
        """Make the engine, in the place of an earlier one."""
        if self._engine is not None:
            self._engine.close()
        self.shadow = None
        self._engine = CHECKPOINT_ENGINES.load(backend)(Member(role, rank, world), EngineOptions(**options))

    @property
    def engine(self) -> CheckpointEngine:
        """The engine; ``open`` came first."""
        assert self._engine is not None
        return self._engine

    def cancel(self) -> None:
        """Stop the transfer under way; from another thread."""
        if self._engine is not None:
            self._engine.cancel()

    def load(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Take the weights that ``module:function`` makes (name -> tensor): what a trainer sends, or a rollout
        member is written into."""
        module, _, attribute = factory.partition(":")
        fresh: Weights = getattr(import_module(module), attribute)(**arguments)
        self.weights, self.shadow = fresh, None
        if self.engine.member.role == "rollout":
            self.engine.bind(fresh)

    def prepare(self, timeout: float, rank: int, world: int) -> dict[str, Any]:
        """See CheckpointEngine."""
        self.engine.seat(rank, world)
        return self.engine.prepare(timeout)

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine."""
        self.engine.init_process_group(**kwargs)

    def inject(self, fault: Mapping[str, Any]) -> None:
        """Put a fault into the next transfer."""
        self.drill = Drill(self.engine, msgspec.convert(fault, Fault))
        self.drill.arm()

    def send(self, version: int, base_version: int | None = None) -> TransferStats:
        """Send the weights."""
        stream: Iterable[tuple[str, torch.Tensor]] = self.weights.items()
        if self.drill is not None:
            stream = self.drill.stream(stream)
            version, base_version = self.drill.arguments(version, base_version)
        try:
            return self.engine.send_weights(stream, version, base_version=base_version)
        finally:
            self._end_drill()

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
        self.staged = None
        received = self._receive(self.shadow, version, base_version, cast)
        self.staged = version
        return received

    def commit(self, version: int) -> None:
        """Serve ``version`` from now on."""
        if self.staged is not None:
            assert self.shadow is not None
            assert self.staged == version
            self.weights, self.shadow, self.staged = self.shadow, self.weights, None
        self.version = version

    def finalize(self, committed: int | None) -> None:
        """See CheckpointEngine's ``settle`` and ``finalize``."""
        self.engine.settle(committed)
        self.engine.finalize()

    def served(self) -> int | None:
        """Return the version that was committed last; None when the weights are not known to be whole."""
        return self.version

    def digest(self) -> dict[str, Any]:
        """Return name -> [dtype, shape, digest of the bytes] of the weights."""
        return {n: described(n, t) for n, t in self.weights.items()}

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _require_base(self, base_version: int | None) -> None:
        if base_version is not None and base_version != self.version:
            raise WrongBaseError(
                f"changes against version {base_version} were to come, and version {self.version} is here"
            )

    def _end_drill(self) -> None:
        if self.drill is not None:
            self.drill.disarm()
            self.drill = None

    def _receive(self, targets: Weights, version: int, base_version: int | None, cast: bool) -> Received:
        try:
            report = self.engine.receive_into(version, targets, cast=cast, base_version=base_version)
        finally:
            self._end_drill()
        summary = self.engine.summary
        assert summary is not None
        return Received(report, self.engine.stats, summary.digest, version)


def serve_host(channel: Channel, host: MemberHost) -> None:
    """Obey messages until the parent closes the channel."""
    signal.signal(signal.SIGUSR1, lambda *_: host.cancel())
    torch.set_num_threads(1)
    while True:
        number, command, arguments = channel.receive(float("inf"), tuple[int, str, dict[str, Any]])
        future = call(lambda c=command, a=arguments: host.handle(c, a), "member")  # type: ignore[misc]
        error = future.exception()
        channel.send([number, None, ErrorData.of(error)] if error is not None else [number, future.result()], 60.0)


def serve(channel: Channel) -> None:
    """Entry point of a member process."""
    serve_host(channel, MemberHost())


def described(name: str, tensor: torch.Tensor) -> list[Any]:
    """Return [dtype code, shape, digest of the bytes] of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    meta = TensorMeta.of(name, tensor)
    return [meta.dtype, list(meta.shape), content_digest(plain.numpy())]
