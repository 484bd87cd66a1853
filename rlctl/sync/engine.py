"""The contract of a checkpoint engine: it carries a stream of named tensors from trainer ranks to rollout workers."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import torch

from rlctl.errors import UsageError
from rlctl.sync.buckets import FilledBucket
from rlctl.sync.deadline import Deadline
from rlctl.sync.delta import DeltaEncoder
from rlctl.sync.device_handle import numbered
from rlctl.sync.engine_options import EngineOptions, Member, Role
from rlctl.sync.errors import GivenUpError, WrongBaseError
from rlctl.sync.packer import Known, Packer
from rlctl.sync.phase_clock import PhaseClock
from rlctl.sync.protocols import LoadReport
from rlctl.sync.targets import matching
from rlctl.sync.tensor_meta import SyncSummary, TensorMeta
from rlctl.sync.traits import BACKEND_TRAITS, Delivery

__all__ = [
    "Arrivals",
    "CheckpointEngine",
    "EngineOptions",
    "Kwargs",
    "Member",
    "Metadata",
    "Role",
    "Stream",
    "TransferStats",
]

Stream = Iterable[tuple[str, torch.Tensor]]
Arrivals = Generator[tuple[str, torch.Tensor], None, None]
Metadata = dict[str, Any]
Kwargs = dict[str, Any]


class TransferStats(msgspec.Struct):
    """What one side did in one transfer.

    Attributes:
        tensors: tensors sent or received.
        bytes_moved: bytes of tensors that this member put on, or took from, the wire: not the size of buckets. A
            broadcast counts once at its sender.
        seconds: wall seconds by phase (``phase_clock.PHASES``), each moment counted once.
        cpu_s: CPU seconds of the process.
        extra_nbytes: memory that the member holds for syncs beside the weights: buckets, bases, shadows.
    """

    tensors: int = 0
    bytes_moved: int = 0
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    cpu_s: float = 0.0
    extra_nbytes: int = 0


class CheckpointEngine(ABC):
    """Carries weights. One instance lives in each member's process, over many syncs.

    A sync is, on every member: ``prepare`` -> ``init_process_group`` -> ``send_weights`` (trainers) or one of the
    ``receive_`` methods (rollout workers), all at once -> ``finalize``, which is always called. Everything after
    ``prepare`` shares one deadline; a wait that it ends raises DeadlineError naming the phase and the peer. Other
    failures raise another TransferError. After any of them the next sync starts at ``prepare`` and works.

    Attributes:
        name: of the backend, as users write it.
        stats: of the last transfer.
        summary: what the last complete receipt was; None while there is none.
        packed_before: what a packer worked out of bound tensors.
        encoder: of a trainer rank that sends deltas.
    """

    name: str = ""
    # What reaches a worker when layouts are declared; an engine that delivers whole tensors refuses them.
    delivers: ClassVar[Delivery] = "whole"
    # Whether the version sent last can be sent once more, to replicas that come later, by the trainer's side alone.
    serves_late: ClassVar[bool] = False

    def __init__(self, member: Member, options: EngineOptions) -> None:
        layouts = self.layouts = options.layouts
        self.member = member if layouts is not None else replace(member, part=0)
        if layouts is not None and self.delivers == "whole":
            raise UsageError(
                f"backend {self.name} delivers whole tensors, and layouts of ranks are declared",
                fix="declare none, and give each replica one worker for all of its ranks; or "
                f"sync.backend={', '.join(n for n, t in BACKEND_TRAITS.items() if t.delivery == 'slices')}",
            )
        if layouts is not None and not 0 <= member.part < layouts.rollout.ranks:
            raise UsageError(f"{member} is rank {member.part} of a replica of {layouts.rollout.ranks} ranks")
        senders = options.senders if layouts is None else layouts.train.ranks
        self.options = replace(options, device=numbered(options.device), senders=senders)
        self.deadline = Deadline(options.timeout)
        self.stats = TransferStats()
        self.summary: SyncSummary | None = None
        self.bound: Mapping[str, torch.Tensor] = {}
        self.packed_before: dict[str, Known] = {}
        self.encoder = DeltaEncoder() if options.delta and member.role == "trainer" else None
        self.id = uuid.uuid4().hex
        self._cancelled = threading.Event()

    @classmethod
    def available(cls) -> None:
        """Raise UnavailableError, with what to install, when this backend cannot run on this machine."""

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tell of tensors that keep their memory, before ``prepare``: those that ``send_weights`` will be given, and
        whose bits stay until it returns, or those that ``receive_into`` will be. A transport may read from them, or
        write into them, where they are, and registers them once. Nobody needs to be told."""
        self.bound, self.packed_before = tensors, {}

    def stays(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of a stream is bound: the same memory, seen alike."""
        bound = self.bound.get(name)
        return bound is not None and (
            bound is tensor
            or (bound.data_ptr(), bound.shape, bound.dtype, bound.stride())
            == (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())
        )

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tell a trainer member which tensors it will send, before ``prepare``: a transport that shares memory has them
        live there from now on (their ``.data`` is elsewhere then). Others need not be told."""

    def seat(self, rank: int, world: int) -> None:
        """Take another rank, before ``prepare``: rollout workers come and go between syncs."""
        self.member = replace(self.member, rank=rank, world=world)

    @abstractmethod
    def prepare(self, timeout: float | None = None) -> Metadata:
        """Start a sync: the deadline begins. Allocate, register and touch buffers, the first time only.

        Returns what the others must know of this member, of types that msgpack knows.
        """

    @classmethod
    @abstractmethod
    def build_topology(cls, trainer_world: int, rollout_world: int, metadata: Sequence[Metadata]) -> list[Kwargs]:
        """Return the arguments of ``init_process_group`` for each member.

        A pure function of what ``prepare`` returned, trainers first and by rank; the result is in the same order.
        It runs in the manager's process, which may lack the backend's library.
        """

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Connect to the others."""

    @abstractmethod
    def send_weights(self, stream: Stream, version: int, *, base_version: int | None = None) -> TransferStats:
        """Send a stream of (name, tensor). Every trainer rank calls this with the whole stream, in lockstep (a
        gather is a collective); the engine sends this rank's share and drops the rest. When sending fails, a rank of
        several still takes the stream to its end before it raises, so that the others' gathers are not left waiting.

        ``base_version``: the version that every receiver holds, if tensors may go as changes against it.
        """

    def send_slices(self, streams: Mapping[int, Stream], version: int) -> TransferStats:
        """Send each rank of the replicas its slices, out of what this trainer rank holds (``Layouts.sources``). Nothing
        is gathered. Every trainer rank calls this; only where layouts are declared."""
        raise UsageError(f"backend {self.name} delivers whole tensors")

    def resend_weights(self, version: int) -> TransferStats:
        """Send the version that was sent last once more, in full and without a stream: the trainer's weights may have
        changed since. Raises WrongBaseError when it is not kept (any more)."""
        raise WrongBaseError(f"{self.member}: backend {self.name} keeps no version that was sent")

    @abstractmethod
    def receive_weights(self, version: int, *, base_version: int | None = None) -> Arrivals:
        """Yield (name, tensor), each checked and valid until the next is asked for; ends when all have come. Who stops
        before that closes the generator, so that the others need not wait."""

    def receive_into(
        self,
        version: int,
        targets: Mapping[str, torch.Tensor],
        *,
        cast: bool = False,
        base_version: int | None = None,
    ) -> LoadReport:
        """Write what arrives into ``targets``, in place. ``cast``: a target may have another dtype.

        Raises:
            MismatchError: shape or dtype of a tensor differs from its target's.
            TransferError: it did not arrive whole; ``targets`` may be a mix.
        """
        loaded, unknown = list[str](), list[str]()
        for name, tensor in self.receive_weights(version, base_version=base_version):
            target = targets.get(name)
            if target is None:
                unknown.append(name)
                continue
            matching(TensorMeta.of(name, tensor), target, cast=cast).copy_(tensor)
            loaded.append(name)
        done = set(loaded)
        return LoadReport(loaded, unknown, [name for name in targets if name not in done])

    def map_weights(self, version: int) -> Mapping[str, torch.Tensor]:
        """Receive without a copy: return the senders' weights where they lie, by name. They are read-only, each is
        checked, and they stay as they are until the next ``map_weights``, or ``release_weights``. A transport that is
        cut off from a sender copies them first.

        Raises:
            UsageError: the transport shares no memory.
            TransferError: they did not arrive whole; those of before stay.
        """
        raise UsageError(f"backend {self.name} shares no memory with receivers", fix="sync.backend=ipc, on one node")

    def release_weights(self) -> None:
        """Let go what ``map_weights`` returned last: it must not be read any more."""

    def receive_buckets(
        self, version: int, acquire: Callable[[int], torch.Tensor], *, base_version: int | None = None
    ) -> Iterator[FilledBucket]:
        """Yield what arrives in buckets that lie in the buffers of ``acquire(k)`` (``slots`` of ``slot_nbytes``, k
        counted around), to be handed on as they are. An engine that cannot receive there packs anew."""
        packer = Packer(
            self.slot_nbytes, acquire, version=version, base_version=base_version, verify=self.options.verify
        )
        return packer.pack(self.receive_weights(version, base_version=base_version))

    @property
    def extra_nbytes(self) -> int:
        """Bytes of memory that the engine holds beside the weights."""
        return 0

    @property
    def slots(self) -> int:
        """Buckets in turn: one more than senders, so that each can be on the wire while one is read."""
        return self.options.senders + 1

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one of them: all together are two buckets, however many they are."""
        return max(2 * self.options.bucket_size // self.slots // 256 * 256, 256)

    def settle(self, committed: int | None) -> None:
        """Learn, before ``finalize``, how the sync ended: the version that every replica serves now, or None."""
        if self.encoder is None:
            return
        if committed is None:
            self.encoder.rollback()
        else:
            self.encoder.commit(committed)

    @abstractmethod
    def finalize(self) -> None:
        """End a sync, also one that failed: let go what the next must not find. Connections are kept or rebuilt by
        the backend's option. Never waits for others."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the engine cannot be used after."""

    def cancel(self) -> None:
        """Ask a transfer to stop at its next bucket; called from another thread."""
        self._cancelled.set()

    def check_cancelled(self, where: str) -> None:
        """Raise GivenUpError when the transfer was cancelled."""
        if self._cancelled.is_set():
            raise GivenUpError(f"{self.member}: the transfer was given up {where}")

    def _coded(self, share: Stream, base_version: int | None) -> Stream:
        """Return what travels for this rank's share of the tensors: changes, where that was asked for. Every engine
        passes what it sends through this; ``delta.DeltaDecoder`` makes weights of what its receiver yields."""
        return share if self.encoder is None else self.encoder.stream(share, base_version)

    def _begin(self, timeout: float | None) -> None:
        layouts, member = self.layouts, self.member
        if layouts is not None and member.role == "trainer" and member.world != layouts.train.ranks:
            raise UsageError(f"{member.world} trainer ranks take part, and the layout has {layouts.train.ranks}")
        self.deadline = Deadline(self.options.timeout if timeout is None else timeout)
        self._cancelled.clear()
        self.summary = None
        self.stats = TransferStats()

    def _close_stats(self, clock: PhaseClock, *, tensors: int, bytes_moved: int) -> TransferStats:
        held = self.extra_nbytes + (0 if self.encoder is None else self.encoder.base_nbytes)
        self.stats = TransferStats(tensors, bytes_moved, clock.seconds, clock.cpu_s, held)
        return self.stats
