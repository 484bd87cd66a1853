"""What a trainer rank can do besides when it trains an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rlctl.model.fsdp2.lora import Fsdp2LoraEngine
    from rlctl.runtime.ranks.local_rank import LocalLoraRank
    from rlctl.runtime.ranks.rank import Rank


def adapted(rank: Rank) -> Fsdp2LoraEngine | LocalLoraRank:
    """Return the engine of a rank that trains an adapter."""
    assert rank.setup.lora is not None
    return cast("Fsdp2LoraEngine | LocalLoraRank", rank.engine)


def _adapter_weights(rank: Rank) -> None:
    rank.send_tensors(("", name, tensor) for name, tensor in adapted(rank).adapter_params())


def _base_weights(rank: Rank) -> None:
    rank.send_tensors(("", name, tensor) for name, tensor in adapted(rank).base_params())


def _base_log_probs(rank: Rank, temperature: float) -> bytes | None:
    from rlctl.experience.row_data import pack_floats

    rows, rank.rows = rank.rows, []
    found = adapted(rank).base_log_probs(rows, temperature=temperature)
    return b"".join(pack_floats(value) for value in found) if rank.first else None


ADAPTER_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "send_base": lambda rank, with_base: rank.sending.send_base(with_base),
    "base_log_probs": _base_log_probs,
    "adapter_weights": _adapter_weights,
    "base_weights": _base_weights,
    "adapter_config": lambda rank: adapted(rank).adapter_config.to_dict(),
    "base_digest": lambda rank: adapted(rank).base_digest,
    "trained_shapes": lambda rank: adapted(rank).trained_shapes(),
}
