"""Model engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.registry import Registry

if TYPE_CHECKING:
    from rlctl.model.base import ModelEngine

MODEL_ENGINES: Registry[type[ModelEngine]] = Registry(
    "model engine",
    {
        "local": "rlctl.model.local:LocalEngine",
        "lora": "rlctl.model.lora:LoraEngine",
        "fsdp2": "rlctl.model.fsdp2.engine:Fsdp2Engine",
        "megatron": "rlctl.model.megatron:MegatronEngine",
    },
    group="rlctl.model_engines",
    base="rlctl.model.base:ModelEngine",
)
