"""Generation on the trainer's own ranks: what each is told, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from rlctl.rollout.base import Output, Request

if TYPE_CHECKING:
    from rlctl.sync.protocols import WeightSource


class TrainedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that the ranks train.

    Attributes:
        config: of the adapter, as PEFT writes it.
        shapes: of its tensors, by their names in the model.
        alone: switches bring it alone, once its base is there; else its base comes every time.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    alone: bool


class RankRolloutSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How one device generates between two updates.

    Attributes:
        engine: name of the rollout engine.
        source: folder or hub name of the model; its configuration is read, weights come from the trainer's ranks.
        trust_remote_code: let the model's folder run its own code.
        dtype: "float32" or "bfloat16".
        device: as torch names it.
        ranks, trainer_tp: of the trainer, all of them and a tensor-parallel group.
        replicas, replica_tp: how many there are, and the ranks of each.
        pad: heads and widths that ``replica_tp`` does not divide are padded with zeros.
        devices_per_node: to take what is missing from near.
        max_slots: most requests that a replica decodes at once.
        max_length: most tokens of prompt and response together.
        offload_params: the trainer's weights leave the device while it generates.
        timeout: seconds for one switch.
        verify: how much of what was moved is hashed on both sides.
        adapter: what is trained when that is an adapter.
        delta: keep the weights that it generates with while it trains; only what changed in them moves.
    """

    engine: str
    source: str
    trust_remote_code: bool
    dtype: str
    device: str
    ranks: int
    trainer_tp: int
    replicas: int
    replica_tp: int
    devices_per_node: int
    max_slots: int
    max_length: int
    offload_params: bool
    timeout: float
    verify: Literal["full", "sampled", "off"]
    adapter: TrainedAdapter | None = None
    delta: bool = False
    pad: bool = False


class Seat(msgspec.Struct, frozen=True):
    """Where a rank generates: rank ``part`` of ``replica``; -1 twice for a rank that has nothing to do."""

    replica: int
    part: int


class Switched(msgspec.Struct, frozen=True):
    """What one rank did to come to its rollout layout.

    Attributes:
        tensors: parts that were placed here.
        sent, received: bytes to and from other devices.
        seconds: by phase.
        shard_bytes: of the weights that it generates with.
        extra_bytes: most memory that the switch took beside weights.
        kept_bytes: what stays here while the ranks train, for the next switch: of weights, in their rollout layout.
    """

    tensors: int
    sent: int
    received: int
    seconds: dict[str, float]
    shard_bytes: int
    extra_bytes: int
    kept_bytes: int = 0


class RankRollout(Protocol):
    """One device as it generates. All ranks make the calls of ``switch``, ``sleep`` and ``wake``; all of a replica the
    others, with the same arguments."""

    seat: Seat

    def switch(self, source: WeightSource, version: int) -> Switched:
        """Take the parts of the rollout's layout out of what the ranks hold; they are of ``version``. Raises
        TransferError when they did not come whole."""

    def wake(self) -> None:
        """Make room for the KV cache."""

    def sleep(self) -> None:
        """Give back KV cache and weights. Requests that run are kept."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests."""

    def decode(self, ticks: int) -> list[Output]:
        """Decode up to ``ticks`` tokens of every request; return what ended."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Return the outputs of ``requests``, in their order."""

    def abort(self) -> list[Output]:
        """End all requests, keeping the tokens made so far."""
