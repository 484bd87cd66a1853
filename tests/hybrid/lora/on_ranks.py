"""What ranks do in the tests of hybrid engines that train an adapter."""

from __future__ import annotations

from typing import Any

from rlctl import HybridEngine
from rlctl.hybrid.lora.parts import adapter_bytes, adapter_modules
from rlctl.schema.work import LoraConfig
from tests.hybrid.engine_on_ranks import PROMPTS, digest, engine_of, recorded_rows, whole
from tests.hybrid.lora.counting import sent_bytes

SAMPLES = 2


def base_digest(engine: HybridEngine) -> str:
    shards = engine.training.shards
    return digest((name, shards.local(name)) for name in shards.names() if name not in shards.trained())


def adapter_of(engine: HybridEngine) -> dict[str, list[float]]:
    return {name: values for name, values in whole(engine).items() if name in engine.training.shards.trained()}


def learn_and_generate(name: str, seed: int, lora: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Update and generate three times; say what was made, with which adapter, and what moved."""
    engine = engine_of(name, seed, lora=LoraConfig(**lora), **options)
    engine.enable_profiling()
    before = base_digest(engine)
    made, counted, adapters = [], [], []
    for step in range(3):
        engine.update(recorded_rows(name, seed + step))
        adapters.append(adapter_of(engine))
        with sent_bytes() as sent:
            engine.switch_to_rollout()
        counted.append(sum(sent))
        found = engine.rollout(PROMPTS, 8, samples=SAMPLES, first_ordinal=10 * step)
        made.append([[list(r.key), r.token_ids, r.logprobs, r.version] for r in found.responses])
    engine.switch_to_training()
    modules = adapter_modules(engine.training.adapter_config, engine.training.trained_shapes())
    switches = [s for s in engine.get_communication_report()["switches"] if s["to"] == "rollout"]
    return {
        "made": made, "adapters": adapters, "counted": counted, "switches": switches,
        "planned": engine.plan.bytes_moved, "alone": adapter_bytes(engine.plan, modules),
        "base": base_digest(engine) == before, "trained": len(list(engine.parameters())),
        "wanted": [int(n) for n in engine.plan.wanted],
    }  # fmt: skip


def refusals(name: str) -> list[str]:
    found = []
    for lora, options in (
        ({"use_dora": True}, {}),
        ({}, {"delta": True}),
        ({}, {"training_parallel": "dp+fsdp+tp"}),
    ):
        try:
            engine_of(name, 1, lora=LoraConfig(rank=2, **lora), **options)
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
    return found
