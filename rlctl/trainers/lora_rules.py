"""What must hold between the keys of ``model.lora``. Each rule is one small pure function."""

from __future__ import annotations

from rlctl.errors import Finding
from rlctl.schema import Config
from rlctl.schema.work import LoraConfig
from rlctl.trainers.rules import Rule


def adapter_has_a_rank(config: Config) -> Finding | None:
    lora, default = config.model.lora, LoraConfig()
    names = ("alpha", "target_modules", "use_rslora", "use_dora", "adapter")
    changed = [name for name in names if getattr(lora, name) != getattr(default, name)]
    changed += ["sync"] if lora.sync == "adapter" else []
    if lora.rank or not changed:
        return None
    return Finding(
        f"model.lora.{changed[0]} is set, and rank 0 trains all weights without an adapter",
        "model.lora.rank",
        f"set model.lora.rank=16, or leave model.lora.{changed[0]} out",
    )


def adapter_has_targets(config: Config) -> Finding | None:
    lora = config.model.lora
    if not lora.rank:
        return None
    where, fix = "model.lora.target_modules", "set it to [all-linear], or to names such as [q_proj,v_proj]"
    if not lora.target_modules:
        return Finding("no module would get an adapter", where, fix)
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        return Finding("all-linear stands for itself and takes no other name beside it", where, fix)
    return None


LORA: tuple[Rule, ...] = (
    Rule("settings of an adapter have an adapter", adapter_has_a_rank),
    Rule("an adapter has modules to sit on", adapter_has_targets),
)
