"""What a weight sync needs of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rlctl.sync.deadline import Deadline
    from rlctl.sync.tensor_meta import TensorMeta

Interruption = Literal["abort", "wait", "keep"]


@dataclass(frozen=True)
class LoadReport:
    """What one weight load did.

    Attributes:
        loaded: names that were written, in the order of the stream.
        unknown: names in the stream that the model does not have.
        untouched: names of the model that the stream did not bring.
        digest: over what the weights became, when changes were applied to what they were; else empty.
    """

    loaded: list[str]
    unknown: list[str]
    untouched: list[str]
    digest: bytes = b""

    @property
    def complete(self) -> bool:
        """True when the stream and the model name the same weights."""
        return not self.unknown and not self.untouched


class WeightSource(Protocol):
    """The trainer's side."""

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, full tensor), one at a time."""

    def offload(self) -> None:
        """Give device memory back."""


@runtime_checkable
class ShardSource(WeightSource, Protocol):
    """A trainer's side that can say what this rank holds, for a delivery in slices."""

    def local_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, this rank's shard), as its layout says; nothing is gathered."""


@runtime_checkable
class MasterSource(WeightSource, Protocol):
    """A trainer's side whose optimizer keeps weights in a dtype of its own."""

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, this rank's shard) as the optimizer keeps it, in its own memory."""


@runtime_checkable
class AdapterShardSource(WeightSource, Protocol):
    """A trainer's side that trains an adapter and can say what this rank holds of base and adapter."""

    def base_and_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's shards in their own memory: the base's by transformers names, the adapter's by its own."""


class Replica(Protocol):
    """The rollout side."""

    replica: str

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        """Take weights in place and carry ``version`` from now on."""

    def weights(self) -> Mapping[str, TensorMeta]:
        """Return what ``load_weights`` takes: names, shapes, dtypes."""

    def digests(self, names: Iterable[str] | None = None) -> Mapping[str, Sequence[Any]]:
        """Read back: name -> [dtype, shape, digest] (``member.described``) of what it computes with now."""

    def wake(self, tags: Sequence[str]) -> None:
        """Bring back memory given up in sleep: "weights", "kv_cache"."""


class Seat(Protocol):
    """One member of a side, as a Group lists it."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def replica(self) -> str:
        """The replica that a rollout member fills; empty for a trainer."""

    @property
    def holds_weights(self) -> bool:
        """Whether the replica's live weights are in this member's process: when it dies, they are gone."""


class Group(Protocol):
    """All members of one side, wherever they run: in child processes, in threads, on Ray.

    ``members`` may change between syncs, not in one.
    """

    @property
    def members(self) -> Sequence[Seat]:
        """The members, by rank."""

    def start(
        self, command: str, arguments: Mapping[int, Mapping[str, Any]], deadline: Deadline
    ) -> dict[int, Future[Any]]:
        """Have members run a command of ``member.MemberHost``, each with its own arguments, all at once.

        Args:
            command: ``prepare``, ``init_process_group``, ``send``, ``resend``, ``receive``, ``stage``, ``commit``,
                ``finalize``.
            arguments: place in ``members`` -> arguments, of types that msgpack knows.
            deadline: each future is done soon after it, whatever the member does: with its result (what the host's
                method returns, as msgpack data), the member's own error, DeadlineError, or PeerLostError when it has
                died. A member that may be killed is, when it is stuck.
        """

    def cancel(self, places: Iterable[int]) -> None:
        """Have the transfers of these members stop at once; returns without waiting."""


class ServedReplica(Protocol):
    """A replica that serves requests, as the manager of syncs sees it. Every call may take until ``deadline`` and
    raises when it fails; one that does not return by then gets the replica fenced."""

    @property
    def replica(self) -> str:
        """Its name."""

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """Take no more requests, and end those that run (abort, the tokens made so far kept), wait for their end, or
        keep them as they are until ``resume``: ``version`` is coming."""

    def release_kv(self, deadline: Deadline) -> None:
        """Drop the KV cache, whose content belongs to the old weights; the weights' memory stays."""

    def restore_kv(self, deadline: Deadline) -> None:
        """Bring the memory of the KV cache back, empty."""

    def resume(self, version: int, deadline: Deadline) -> None:
        """Serve again, with these weights."""

    def fence(self, reason: str) -> None:
        """Leave the routing until a later sync calls ``resume``: the weights are not whole, or not known to be.
        Returns at once and does not fail."""
