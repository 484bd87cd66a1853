"""What only devices that both train and generate can do. Each rule is one small pure function."""

from __future__ import annotations

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.trainers.rules import Rule


def padded_replicas_share_devices(config: Config) -> Finding | None:
    placement, what = config.placement, ""
    if placement.pad and placement.layout != "hybrid":
        what = f"replicas of the {placement.layout} layout are not padded"
    elif placement.pad and config.rollout.engine != "transformers":
        what = f"the rollout engine {config.rollout.engine} takes heads and widths as they are"
    elif placement.pad and config.model.lora.rank:
        what = "an adapter is not added to weights that are padded"
    return Finding(what, "placement.pad", "set placement.pad=false") if what else None


def deltas_have_a_base(config: Config) -> Finding | None:
    layout = config.placement.layout
    if not config.sync.delta or (layout == "hybrid" and not config.model.lora.rank):
        return None
    what = "an adapter moves whole" if layout == "hybrid" else f"runs in the {layout} layout send whole versions"
    return Finding(what, "sync.delta", "set sync.delta=false")


IN_PLACE: tuple[Rule, ...] = (
    Rule("padded replicas generate on the trainer's ranks", padded_replicas_share_devices),
    Rule("deltas have something to change", deltas_have_a_base),
)
