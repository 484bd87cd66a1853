"""Memory of runs that nobody has written down before."""

from __future__ import annotations

import random

import pytest

from rlctl.errors import RlctlError
from rlctl.ops.memory_profile import profile_memory
from rlctl.ops.resolve import resolve

MODELS = ("qwen3-0.6b", "qwen2.5-0.5b", "llama-3.1-8b", "qwen3-8b", "cycle-tiny")
NUMBERS = {
    "cluster.nodes": (1, 2, 3), "cluster.devices_per_node": (1, 2, 3, 8), "cluster.device_memory": (0, 1, 80 * 10**9),
    "placement.trainer_ranks": (1, 2, 3, 8), "placement.trainer_tp": (1, 2, 3), "placement.replicas": (0, 1, 2, 8),
    "placement.replica_tp": (1, 2, 3, 7), "placement.hybrid_replicas": (0, 1, 2), "placement.reward_devices": (0, 1),
    "trainer.prompts_per_step": (1, 7, 128), "trainer.micro_batch_tokens": (1, 500, 16384),
    "task.max_prompt_tokens": (1, 17, 4096), "rollout.max_new_tokens": (1, 33, 100000),
    "rollout.samples_per_prompt": (1, 2, 16), "rollout.max_slots": (1, 64, 4096), "model.lora.rank": (0, 1, 256),
    "sync.bucket_size": (1, 1 << 30),
}  # fmt: skip
WORDS = {
    "cluster.device": ("cpu", "cuda", "npu"), "placement.layout": ("colocated", "separate", "hybrid"),
    "model.dtype": ("float32", "bfloat16"), "model.gradient_checkpointing": ("true", "false"),
    "rollout.engine": ("transformers", "vllm"), "trainer.offload.params": ("true", "false", "null"),
    "algorithm.kl.place": ("none", "loss"), "model.lora.sync": ("merged", "adapter"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_any_configuration_is_estimated_or_refused_in_words(seed: int) -> None:
    rng = random.Random(seed)
    estimated = 0
    for _ in range(60):
        overrides = [
            f"{key}={rng.choice(values)}" for key, values in {**NUMBERS, **WORDS}.items() if rng.random() < 0.2
        ]
        print(overrides)
        try:
            found = profile_memory(
                resolve("cpu-quickstart", flags={"--model": rng.choice(MODELS)}, overrides=overrides)
            )
        except RlctlError as error:
            assert error.message
            continue
        for phase in found.estimate.phases:
            assert phase.nbytes == sum(phase.parts.values())
            assert all(n >= 0 for n in phase.parts.values())
        assert found.estimate.peak.nbytes == max(found.rank_peaks)
        found.document()
        estimated += 1
    assert estimated
