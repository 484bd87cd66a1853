"""Waking an engine on shared devices: all at once, or in stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WakePeaks:
    """Bytes on one device while an engine wakes and takes new weights.

    Attributes:
        at_once: weights and KV cache wake together, beside the trainer and the new weights.
        staged: weights wake -> load -> the trainer's copy goes -> KV cache wakes.
        stages: bytes after each stage of the staged way.
    """

    at_once: int
    stages: tuple[tuple[str, int], ...]

    @property
    def staged(self) -> int:
        """The highest of the stages."""
        return max(nbytes for _, nbytes in self.stages)


def wake_peaks(*, trainer: int, new_weights: int, engine_weights: int, kv_cache: int, stays: int) -> WakePeaks:
    """Return the peaks of both ways.

    Args:
        trainer: bytes of the trainer on the device.
        new_weights: bytes of the new weights beside the engine's own (a full copy, or two buckets).
        engine_weights: bytes of the engine's weights.
        kv_cache: bytes of its KV cache.
        stays: bytes of the trainer that stay on the device when its copy of the new weights is dropped.
    """
    loaded = trainer + new_weights + engine_weights
    return WakePeaks(
        at_once=loaded + kv_cache,
        stages=(
            ("wake weights", trainer + engine_weights),
            ("load", loaded),
            ("drop copy", stays + engine_weights),
            ("wake KV cache", stays + engine_weights + kv_cache),
        ),
    )
