"""A process that hosts a checkpoint engine and obeys messages.

A message is ``[number, command, arguments]``, the answer ``[number, result, error]``. Commands run one at a time, those
that SIGUSR1 cancels in a thread of their own, while the main thread stays ready for it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import torch

from rlctl.process import Channel
from rlctl.sync.calls import call, error_of
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member, Stream, TransferStats
from rlctl.sync.error_data import ErrorData
from rlctl.sync.faults import Drill, Fault
from rlctl.sync.protocols import LoadReport
from rlctl.sync.registry import CHECKPOINT_ENGINES


class Received(msgspec.Struct):
    """What a rollout member got.

    Attributes:
        report: names loaded, unknown, untouched.
        stats: of the transfer.
        digest: of the whole sync (16 bytes; equal on every member that got the same).
        version: that was received.
        part: which rank of its replica it was received for.
    """

    report: LoadReport
    stats: TransferStats
    digest: bytes
    version: int
    part: int = 0


class EngineHost:
    """What members of both sides share. Its public methods are commands.

    Attributes:
        cancellable: those that ``cancel`` stops.
    """

    cancellable: ClassVar[frozenset[str]] = frozenset({"send", "resend", "receive", "stage"})

    def __init__(self) -> None:
        self.drill: Drill | None = None
        self._engine: CheckpointEngine | None = None

    @property
    def engine(self) -> CheckpointEngine:
        """The engine; ``open`` came first."""
        assert self._engine is not None
        return self._engine

    def handle(self, command: str, arguments: Mapping[str, Any]) -> object:
        """Run one command: a public method of this class."""
        assert not command.startswith("_")
        method: Callable[..., object] = getattr(self, command)
        return method(**arguments)

    def open(self, backend: str, role: Any, rank: int, world: int, options: Mapping[str, Any], part: int = 0) -> None:
        """Make the engine, in the place of an earlier one. ``part``: see Member."""
        if self._engine is not None:
            self._engine.close()
        self._engine = CHECKPOINT_ENGINES.load(backend)(Member(role, rank, world, part), EngineOptions(**options))

    def cancel(self) -> None:
        """Stop the transfer under way; from another thread."""
        if self._engine is not None:
            self._engine.cancel()

    def prepare(self, timeout: float, rank: int, world: int) -> dict[str, Any]:
        """See CheckpointEngine. What is returned says also, in ``bases``, which version deltas could be made against:
        command (``send``, ``receive``, ``stage``) -> version or None; a command that is not there takes any; and in
        ``layouts`` which are declared, empty when none are."""
        self.engine.seat(rank, world)
        layouts = self.engine.layouts
        declared = "" if layouts is None else layouts.fingerprint
        return {**self.engine.prepare(timeout), "bases": self._bases(), "layouts": declared}

    def init_process_group(self, **kwargs: Any) -> None:
        """See CheckpointEngine."""
        self.engine.init_process_group(**kwargs)

    def inject(self, fault: Mapping[str, Any]) -> None:
        """Put a fault into the next transfer."""
        self.drill = Drill(self.engine, msgspec.convert(fault, Fault))
        self.drill.arm()

    def resend(self, version: int, base_version: int | None = None) -> TransferStats:
        """See CheckpointEngine's ``resend_weights``."""
        assert base_version is None
        return self.engine.resend_weights(version)

    def finalize(self, committed: int | None) -> None:
        """See CheckpointEngine's ``settle`` and ``finalize``."""
        self.engine.settle(committed)
        self.engine.finalize()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _bases(self) -> dict[str, int | None]:
        encoder = self.engine.encoder
        return {} if encoder is None else {"send": encoder.version}

    def _send(self, streams: Mapping[int, Stream] | Stream, version: int, base_version: int | None) -> TransferStats:
        """Send one stream to all, or each rank of the replicas its own, with the drill's fault in it."""
        drill = self.drill
        if drill is not None:
            version, base_version = drill.arguments(version, base_version)
        try:
            if isinstance(streams, Mapping):
                if drill is not None:
                    streams = {part: drill.stream(stream) for part, stream in streams.items()}
                return self.engine.send_slices(streams, version)
            stream = streams if drill is None else drill.stream(streams)
            return self.engine.send_weights(stream, version, base_version=base_version)
        finally:
            self._end_drill()

    def _end_drill(self) -> None:
        if self.drill is not None:
            self.drill.disarm()
            self.drill = None


def serve_host(channel: Channel, host: EngineHost) -> None:
    """Obey messages until the parent closes the channel."""
    here = late = False

    def cancel(*_: object) -> None:
        nonlocal late
        if here:  # what this thread is in must not be stopped in the middle, and is none that it was sent for
            late = True
        else:
            host.cancel()

    signal.signal(signal.SIGUSR1, cancel)
    torch.set_num_threads(1)
    while True:
        # In this thread, and not in the one that transfers: a signal is handled before the next message is read, so
        # that it cannot cancel a transfer later than the one that it was sent for.
        number, command, arguments = channel.receive(float("inf"), tuple[int, str, dict[str, Any]])
        if command in host.cancellable:
            future = call(lambda c=command, a=arguments: host.handle(c, a), "member")  # type: ignore[misc]
            error = error_of(future)
            result = future.result() if error is None else None
        else:  # to wake another thread for it costs as much as it does
            result = error = None
            here = True
            try:
                result = host.handle(command, arguments)
            except BaseException as caught:  # noqa: BLE001 - the parent gets it
                error = caught
            here = False
            if late:
                late = False
                host.cancel()
        channel.send([number, result, None if error is None else ErrorData.of(error)], 60.0)
