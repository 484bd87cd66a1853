"""What a configuration means for weight syncs of a run that trains an adapter."""

from __future__ import annotations

from rlctl.schema.root import Config


def adapter_alone(config: Config) -> bool:
    """Whether rollouts are sent an adapter alone, once they hold its base."""
    lora, hybrid = config.model.lora, config.placement.layout == "hybrid"
    return lora.rank > 0 and (lora.sync == "adapter" or (lora.sync == "auto" and hybrid))
