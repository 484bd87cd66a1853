"""Adapters of a few tensors, and merges of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlctl.keys.lora.adapter import Adapter
from rlctl.keys.lora.config import AdapterConfig
from rlctl.keys.lora.merge import merge_stream
from rlctl.keys.lora.merge_plan import plan_merge

PREFIX = "base_model.model."


def adapter(tensors: dict[str, Tensor], **fields: Any) -> Adapter:
    return Adapter.from_tensors(tensors, AdapterConfig.parse(fields))


def merged(base: dict[str, Tensor], one: Adapter, **options: Any) -> dict[str, Tensor]:
    plan = plan_merge(one.contents, one.config, {n: tuple(t.shape) for n, t in base.items()}, **options)
    return dict(merge_stream(base.items(), one, plan))
