"""gpt-oss: experts are stored stacked, (E, in, out), gate and up mixed on the last dimension, with biases.

Its tensors are converted between wrappers, shards and Hugging Face folders as they are; nothing takes the stacks apart.
"""

from __future__ import annotations

from rlctl.keys.architectures.rows import Architecture

GPT_OSS = Architecture("gpt_oss", status={"hf": "verified", "hf-fused": "same as hf", "vllm": "names only"})
