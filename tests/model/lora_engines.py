"""LoRA engines on small models: new, trained a little, begun with an adapter."""

import torch
from transformers import AutoModelForCausalLM

from rlctl.model.lora import LoraEngine
from rlctl.schema.training import OptimizerConfig
from rlctl.schema.work import LoraConfig
from tests.model.tiny import LOSS, random_rows


def engine(folder, *targets: str, rank: int = 4, alpha: float = 16.0, dtype: str = "float32", seed: int = 1, **form):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(rank=rank, alpha=alpha, target_modules=list(targets or ["all-linear"]), **form)
    return LoraEngine(model, OptimizerConfig(lr=1e-2), lora=lora, seed=seed, base=str(folder), dtype=dtype)


def trained(folder, *targets: str, updates: int = 3, **settings) -> LoraEngine:
    one = engine(folder, *targets, **settings)
    for _ in range(updates):
        one.update(random_rows(), LOSS)
    return one


def begin(folder, adapter, *targets: str, rank: int = 4, alpha: float = 16.0, **form) -> LoraEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = list(targets or ["all-linear"])
    lora = LoraConfig(rank=rank, alpha=alpha, target_modules=names, adapter=str(adapter), **form)
    return LoraEngine(model, OptimizerConfig(lr=1e-2), lora=lora, seed=7, base=str(folder))
