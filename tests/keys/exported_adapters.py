"""Adapters as an export finds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig

Q = "base_model.model.model.layers.0.self_attn.q_proj"


LAYER: dict[str, Tensor] = {f"{Q}.lora_A.weight": torch.ones(2, 16), f"{Q}.lora_B.weight": torch.ones(16, 2)}


def adapter(tensors: dict[str, Tensor], **fields: Any) -> Adapter:
    return Adapter.from_tensors(tensors, AdapterConfig.parse({"r": 2, "lora_alpha": 8} | fields))
