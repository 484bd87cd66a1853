"""What the devices of a run keep while they train, of a configuration and its model."""

from __future__ import annotations

from rlctl.hybrid.kept import kept_nbytes
from rlctl.keys.model_spec import ModelSpec
from rlctl.schema import Config


def kept_of(config: Config, spec: ModelSpec) -> list[tuple[int, int]]:
    """Return, by device, the bytes of generation shards and of what was sent that it keeps; see ``kept_nbytes``.

    Raises UsageError when the model cannot be cut so, or there are too few devices.
    """
    place = config.placement
    return kept_nbytes(
        spec,
        "BF16" if config.model.dtype == "bfloat16" else "F32",
        place.trainer_ranks,
        place.trainer_tp,
        place.replicas,
        place.replica_tp,
        config.cluster.devices_per_node,
        config.rollout.engine,
        place.pad,
    )
