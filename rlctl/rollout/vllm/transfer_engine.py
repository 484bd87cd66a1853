"""rlctl's checkpoint engines as backends of vLLM's weight transfer: the side of vLLM's workers.

One class serves all of them; ``weight_transfer_config={"backend": "rlctl-gloo"}`` says which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlctl.errors import RlctlError, UsageError
from rlctl.process import TOKEN_VARIABLE
from rlctl.rollout.vllm.meeting import Connect, End, Outcome, Prepared, Seat, hear, tell
from rlctl.rollout.vllm.names import backend_of
from rlctl.rollout.vllm.plugin import CORE, problems
from rlctl.rollout.vllm.weights import VllmWeights, weights_of
from rlctl.sync.channel import Channel, connect
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import MismatchError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.registry import CHECKPOINT_ENGINES

T = TypeVar("T")
TRAINER = "the trainer"


@dataclass
class RlctlInitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` takes; all of it is JSON.

    Attributes:
        address: where the trainer is met, ``tcp:HOST:PORT`` or ``unix:PATH``.
        options: fields of ``rlctl.sync.engine.EngineOptions`` but the token, which is in the environment of both.
        staged: keep what arrives apart until all workers have all of it: a failed update leaves the old weights. It
            costs one copy of the worker's weights while it lasts.
        cast: weights may come in another dtype than the engine's.
    """

    address: str
    options: dict[str, Any] = field(default_factory=dict)
    staged: bool = False
    cast: bool = False


@dataclass
class RlctlUpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` takes: the version that comes, and the seconds that it may take."""

    version: int
    timeout: float


class RlctlWeightTransferEngine(WeightTransferEngine[RlctlInitInfo, RlctlUpdateInfo]):
    """See above. A failed update raises; the engine must not generate before a later one has succeeded, unless
    updates are staged."""

    init_info_cls = RlctlInitInfo
    update_info_cls = RlctlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        backend = backend_of(config.backend)
        assert backend is not None
        self._backend = backend
        self._init: RlctlInitInfo | None = None
        self._engine: CheckpointEngine | None = None
        self._weights: VllmWeights | None = None
        self.version: int | None = None

    def init_transfer_engine(self, init_info: RlctlInitInfo) -> None:
        """Make the checkpoint engine; the trainer is met by each update. Raises RlctlError when updates would fail."""
        if CORE in problems:
            raise RlctlError(f"vLLM's prefix cache would go stale: {problems[CORE]}")
        token = os.environ.get(TOKEN_VARIABLE)
        if token is None:
            raise UsageError(
                f"{TOKEN_VARIABLE} is not set in vLLM's environment",
                fix="start vLLM with the token that the trainer has under the same name",
            )
        self.shutdown()
        self._weights = weights_of(self.model, self.vllm_config)
        options = EngineOptions(**{**init_info.options, "token": token})
        engine = CHECKPOINT_ENGINES.load(self._backend)
        engine.available()
        self._engine = engine(Member("rollout", 0, 1), options)
        self._init = init_info

    def start_weight_update(self) -> None:
        """Nothing is to be done before the trainer is met."""

    def finish_weight_update(self) -> None:
        """Nothing is left to be done: ``update_weights`` returned when all of it was there."""

    def receive_weights(self, update_info: RlctlUpdateInfo) -> None:
        """Take one version, whole. Raises RlctlError."""
        if self._engine is None or self._init is None:
            raise UsageError("update_weights came before init_weight_transfer_engine")
        deadline = Deadline(update_info.timeout)
        committed: int | None = None
        try:
            with connect(self._init.address, self._engine.options.token.encode(), TRAINER, deadline) as channel:
                committed = self._sync(channel, update_info.version, deadline)
        finally:
            self._engine.settle(committed)
            self._engine.finalize()

    def shutdown(self) -> None:
        """Let the trainer go."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _sync(self, channel: Channel, version: int, deadline: Deadline) -> int:
        assert self._engine is not None
        assert self._init is not None
        engine, staged = self._engine, self._init.staged
        seat = hear(channel, Seat, deadline)
        engine.seat(seat.rank, seat.world)

        def prepare() -> dict[str, Any]:
            self._bind(engine, staged)
            return engine.prepare(deadline.remaining)

        metadata = _or_tell(prepare, lambda e: tell(channel, Prepared(error=e), deadline))
        tell(channel, Prepared(metadata), deadline)
        kwargs = hear(channel, Connect, deadline).kwargs
        kept: dict[str, torch.Tensor] = {}

        def receive() -> LoadReport:
            engine.init_process_group(**kwargs)
            return self._keep(engine, version, kept) if staged else self._load(engine, version)

        report = _or_tell(receive, lambda e: tell(channel, Outcome(error=e), deadline))
        assert engine.summary is not None
        tell(channel, Outcome(report, engine.summary.digest), deadline)
        committed = hear(channel, End, deadline).committed
        if committed is None:
            raise MismatchError("the weights did not arrive whole everywhere, so this update was given up")
        if staged:
            _or_tell(lambda: self._commit(kept), lambda e: tell(channel, Outcome(error=e), deadline))
        self.version = committed
        tell(channel, Outcome(report), deadline)
        return committed

    def _bind(self, engine: CheckpointEngine, staged: bool) -> None:
        assert self._weights is not None
        engine.bind({} if staged else self._weights.views or {})

    def _load(self, engine: CheckpointEngine, version: int) -> LoadReport:
        assert self._weights is not None
        assert self._init is not None
        self.version = None
        if self._weights.views is not None:
            return engine.receive_into(version, self._weights.views, cast=self._init.cast)
        return self._weights.load(engine.receive_weights(version), cast=self._init.cast)

    def _keep(self, engine: CheckpointEngine, version: int, kept: dict[str, torch.Tensor]) -> LoadReport:
        assert self._weights is not None
        targets, unknown = self._weights.targets(), list[str]()
        for name, tensor in engine.receive_weights(version):
            if name not in targets:
                unknown.append(name)
                continue
            if tuple(tensor.shape) != targets[name].shape:
                raise MismatchError(f"tensor {name} is {tuple(tensor.shape)}, the engine's is {targets[name].shape}")
            kept[name] = tensor.clone()
        return LoadReport(list(kept), unknown, [name for name in targets if name not in kept])

    def _commit(self, kept: dict[str, torch.Tensor]) -> LoadReport:
        assert self._weights is not None
        assert self._init is not None
        self.version = None

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name in list(kept):
                yield name, kept.pop(name)

        return self._weights.load(stream(), cast=self._init.cast)


def _or_tell(action: Callable[[], T], tell_error: Callable[[ErrorData], None]) -> T:
    """Return what ``action`` returns; tell the other side of an error before it is raised."""
    try:
        return action()
    except Exception as error:
        tell_error(ErrorData.of(error))
        raise
