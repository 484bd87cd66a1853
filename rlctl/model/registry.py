"""Model engines by name."""

from rlctl.model.base import ModelEngine
from rlctl.registry import Registry

MODEL_ENGINES: Registry[type[ModelEngine]] = Registry(
    "model engine",
    {"local": "rlctl.model.local:LocalEngine", "lora": "rlctl.model.lora:LoraEngine"},
    group="rlctl.model_engines",
    base="rlctl.model.base:ModelEngine",
)
