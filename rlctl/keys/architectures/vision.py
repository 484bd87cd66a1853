"""Qwen2.5-VL and Qwen3-VL: a language model and a vision tower, whose prefixes differ from scheme to scheme."""

from __future__ import annotations

from rlctl.keys.architectures.rows import Architecture

HELD = {"hf": "verified", "hf-fused": "verified", "vllm": "names as vLLM's own mapper gives them"}

QWEN2_5_VL = Architecture("qwen2_5_vl", status=HELD)
QWEN3_VL = Architecture("qwen3_vl", status=HELD)
