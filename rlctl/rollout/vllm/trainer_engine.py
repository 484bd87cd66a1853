"""rlctl's checkpoint engines as backends of vLLM's weight transfer: the trainer's side.

trainer = WeightTransferTrainerFactory.trainer_init(
    RlctlTrainerInit(rank=0, backend="rlctl-gloo", workers=2), client=client, source=ModuleSource(model)
)
trainer.send_weights()
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from rlctl.errors import RlctlError
from rlctl.process import run_token
from rlctl.rollout.vllm.meeting import Connect, End, Outcome, Prepared, Seat, hear, tell
from rlctl.rollout.vllm.names import backend_of
from rlctl.sync.calls import call
from rlctl.sync.channel import Channel, Listener
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import CheckpointEngine, EngineOptions, Member, Stream
from rlctl.sync.error_data import ErrorData
from rlctl.sync.errors import CorruptedError, DeadlineError, MismatchError, TransferError
from rlctl.sync.registry import CHECKPOINT_ENGINES

M = TypeVar("M", Prepared, Outcome)
_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0


@dataclass
class RlctlTrainerInit(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` takes.

    Attributes:
        backend: ``rlctl-`` and the name of a checkpoint engine; the engine's ``weight_transfer_config`` says the same.
        workers: vLLM's workers, those of all engines that ``client`` speaks to.
        options: of the checkpoint engine; its token is the run's.
        staged: see ``transfer_engine.RlctlInitInfo``.
        cast: likewise.
    """

    backend: str = "rlctl-gloo"
    workers: int = 1
    options: EngineOptions = field(default_factory=EngineOptions)
    staged: bool = False
    cast: bool = False


class RlctlTrainerEngine(TrainerWeightTransferEngine[RlctlTrainerInit]):
    """Rank 0 sends; the others iterate the source, so that its gathers meet.

    Attributes:
        version: that was sent last, whole.
    """

    init_info_cls = RlctlTrainerInit

    def __init__(self, init_info: RlctlTrainerInit, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.version = 0
        self._info = init_info
        self._listener: Listener | None = None
        self._engine: CheckpointEngine | None = None

    @classmethod
    def trainer_init(cls, init_info: RlctlTrainerInit, *, client: Any, source: Any = None) -> Self:
        """Listen for the workers, and tell them where. Raises RlctlError."""
        trainer = cls(init_info, client=client, source=source)
        if init_info.is_sender:
            trainer._open()
        return trainer

    def send_weights(self, version: int | None = None) -> None:
        """Bring the source's weights, as they are now, to every worker; ``version`` is one more than the last's unless
        given. Raises RlctlError when not all of them have all of it: unless updates are staged, the engines must not
        generate then before a later call has succeeded."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        due = self.version + 1 if version is None else version
        deadline = Deadline(self._info.options.timeout)
        self.client.start_weight_update()
        updating = call(lambda: self._update(due, deadline), "update_weights")
        try:
            self._send(due, updating, deadline)
        except RlctlError as error:
            with suppress(Exception):  # what it says follows from the error that we have
                updating.result(min(_END_SECONDS, deadline.remaining + 1))
            old = "the engines have their old weights" if self._info.staged else "the engines must not generate"
            raise type(error)(f"version {due}: {error.message}", where=error.where, fix=error.fix or old) from error
        updating.result(deadline.remaining + _END_SECONDS)
        self.client.finish_weight_update(str(due))
        self.version = due

    def shutdown(self) -> None:
        """Free everything."""
        for part in (self._listener, self._engine):
            if part is not None:
                part.close()
        self._listener = self._engine = None

    def _open(self) -> None:
        backend = backend_of(self._info.backend)
        if backend is None:
            raise CHECKPOINT_ENGINES.unknown(self._info.backend)
        engine = CHECKPOINT_ENGINES.load(backend)
        engine.available()
        options = asdict(self._info.options) | {"token": run_token(), "senders": 1}
        self._engine = engine(Member("trainer", 0, 1), EngineOptions(**options))
        self._listener = Listener(f"tcp:{self._engine.options.host}:0", options.pop("token").encode())
        self.client.init_weight_transfer_engine(
            {
                "address": self._listener.address,
                "options": options,
                "staged": self._info.staged,
                "cast": self._info.cast,
            }
        )

    def _update(self, version: int, deadline: Deadline) -> None:
        self.client.update_weights({"version": version, "timeout": deadline.remaining})

    def _send(self, version: int, updating: Future[None], deadline: Deadline) -> None:
        assert self._engine is not None
        engine, workers = self._engine, self._info.workers
        committed: int | None = None
        with ExitStack() as open_channels:
            try:
                channels = [open_channels.enter_context(self._accept(updating, deadline)) for _ in range(workers)]
                for rank, channel in enumerate(channels):
                    tell(channel, Seat(rank, workers), deadline)
                mine = engine.prepare(deadline.remaining)
                theirs = [_heard(channel, Prepared, deadline).metadata for channel in channels]
                first, *others = engine.build_topology(1, workers, [mine, *theirs])
                for channel, kwargs in zip(channels, others, strict=True):
                    tell(channel, Connect(kwargs), deadline)
                self._transfer(engine, channels, first, version, deadline)
                for channel in channels:
                    tell(channel, End(version), deadline)
                for channel in channels:
                    _heard(channel, Outcome, deadline)
                committed = version
            finally:
                engine.settle(committed)
                engine.finalize()

    def _transfer(
        self,
        engine: CheckpointEngine,
        channels: list[Channel],
        kwargs: dict[str, Any],
        version: int,
        deadline: Deadline,
    ) -> None:
        failed: Exception | None = None
        try:
            engine.init_process_group(**kwargs)
            engine.send_weights(self._stream(), version)
        except TransferError as error:  # a worker's own reason says more
            failed = error
            engine.finalize()
        outcomes = [_heard(channel, Outcome, deadline) for channel in channels]
        if failed is not None:
            raise failed
        for place, outcome in enumerate(outcomes):
            assert outcome.report is not None
            odd = [*outcome.report.unknown, *outcome.report.untouched]
            if odd:
                raise MismatchError(
                    f"worker {place} loaded {len(outcome.report.loaded)}, unknown {len(outcome.report.unknown)}, "
                    f"untouched {len(outcome.report.untouched)} ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})"
                )
            if outcome.digest != outcomes[0].digest:
                raise CorruptedError(f"worker {place} has another digest than worker 0")

    def _stream(self) -> Stream:
        return ((name, tensor.detach()) for name, tensor in self.source)

    def _accept(self, updating: Future[None], deadline: Deadline) -> Channel:
        """Return a worker's connection. Raises what vLLM's update call raises, should it end before."""
        assert self._listener is not None
        while True:
            try:
                return self._listener.accept("a worker of vLLM", deadline.within(_LOOK_SECONDS))
            except DeadlineError:
                deadline.check("waiting for vLLM's workers to connect")
                if updating.done():
                    error = updating.exception()
                    raise (ErrorData.of(error).error() if error is not None else _ended_early()) from error


def _heard(channel: Channel, kind: type[M], deadline: Deadline) -> M:
    message = hear(channel, kind, deadline)
    if message.error is not None:
        raise message.error.error()
    return message


def _ended_early() -> TransferError:
    return TransferError("vLLM's update_weights returned before its workers had come", fix="is `workers` right?")
