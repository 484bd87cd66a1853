"""What ranks that generate by vLLM do in the tests."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen3Config

from rlctl import HybridEngine
from rlctl.errors import RlctlError
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.hybrid.reshard.errors import ReshardError
from rlctl.hybrid.vllm.sampler import VllmSampler
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.schema.work import LoraConfig
from tests.hybrid.engine_on_ranks import LOSS, OPTIMIZER, whole
from tests.rollout.tiny import make_model

# vLLM's attention wants heads of 32 numbers; 300 token ids are padded to 320.
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "qwen2-tied": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3-one-kv-head": Qwen3Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=False),
}
# One longer than a block of vLLM's (128 tokens), which its prefix cache would keep.
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [(7 * i) % 256 for i in range(150)]]


def random_model(name: str, seed: int) -> Any:
    """Return a model whose log-probs, like those of trained ones, lie within some units."""
    model = make_model(MODELS[name], seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.5)
    return model


def rows(seed: int) -> list[Row]:
    noise = random.Random(seed)
    found = []
    for number in range(4):
        ids = [noise.randrange(300) for _ in range(12)]
        old = np.full(8, -5.0, np.float32)
        advantages = np.full(8, noise.choice([-1.0, 1.0]), np.float32)
        found.append(
            Row(
                RequestKey(number, 0), number, ids[:4], ids[4:], 0.0, old, np.zeros(8, np.int64), old_logprobs=old,
                ref_logprobs=old, advantages=advantages,
            )
        )  # fmt: skip
    return found


def engine_of(name: str, seed: int, **options: Any) -> HybridEngine:
    model = random_model(name, seed).requires_grad_(True)
    return HybridEngine(
        model, None, rollout_engine="vllm", optimizer=OPTIMIZER, loss=LOSS, max_length=256, seed=seed, **options
    )


def plain(outputs: list[Output]) -> list[Any]:
    return [[o.token_ids, o.logprobs, o.finish_reason, [s.version for s in o.segments]] for o in outputs]


def requests(first: int, temperature: float = 0.0, new: int = 12) -> list[Request]:
    params = SamplingParams(new, temperature=temperature)
    return [Request(RequestKey(first + n, 0), tuple(prompt), params, 5) for n, prompt in enumerate(PROMPTS)]


def learn_and_generate(name: str, seed: int, **options: Any) -> dict[str, Any]:
    """Update and generate in turn, greedily and not."""
    torch.manual_seed(seed)
    set_threads = torch.set_num_threads
    adapted = options.pop("lora_rank", 0)
    engine = engine_of(name, seed, **options, lora=LoraConfig(rank=adapted, alpha=8))
    engine.enable_profiling()
    rounds = []
    for step in range(2):
        engine.update(rows(seed + step))
        weights = {} if adapted else whole(engine)
        state = torch.get_rng_state()
        greedy = engine.rollout(PROMPTS, 8, temperature=0.0, first_ordinal=10 * step)
        drawn = engine.rollout(PROMPTS, 8, samples=2, first_ordinal=10 * step)
        again = engine.rollout(PROMPTS, 8, samples=2, first_ordinal=10 * step)
        assert [r.token_ids for r in drawn.responses] == [r.token_ids for r in again.responses]
        assert torch.equal(state, torch.get_rng_state()) and torch.set_num_threads is set_threads
        sampler = engine.sampler
        assert isinstance(sampler, VllmSampler)
        held = sampler.weight_bytes
        engine.switch_to_training()
        responses = [*greedy.responses, *drawn.responses]
        made = [[r.prompt_ids, r.token_ids, r.logprobs, r.version] for r in responses]
        scored = [
            engine.training.log_probs(some.batch([0.0] * len(some.responses)), temperature=1.0)
            for some in (greedy, drawn)
        ]
        gap = max(
            np.abs(mine - np.asarray(r.logprobs, np.float32)).max()
            for r, mine in zip(responses, [*scored[0], *scored[1]], strict=True)
        )
        rounds.append({"weights": weights, "made": made, "held": held, "left": sampler.weight_bytes, "gap": float(gap)})
    report = engine.get_communication_report()
    moved = [s["total_bytes"] for s in report["switches"] if s["to"] == "rollout"]
    return {"rounds": rounds, "moved": moved, "planned": report["planned_bytes"]}


def interrupted(name: str, seed: int, **options: Any) -> dict[str, Any]:
    """Requests that are aborted and continued, that sleep under way and are given other weights, and wrong parts."""
    engine = engine_of(name, seed, **options)
    engine.switch_to_rollout()
    sampler = engine.sampler
    assert isinstance(sampler, VllmSampler)
    straight = sampler.generate(requests(0))
    sampler.submit(requests(10))
    for _ in range(5):
        assert not sampler.step()
    parts = sampler.abort()
    assert sampler.num_running == 0
    first = requests(20)
    rest = [
        Request(r.key, r.prompt_ids, r.params, r.seed, tuple(o.segments)) for r, o in zip(first, parts, strict=True)
    ]
    continued = sampler.generate(rest)
    sampler.submit(requests(30))
    for _ in range(5):
        sampler.step()
    engine.update(rows(seed))  # sleeps under way
    weights = whole(engine)
    engine.switch_to_rollout()
    mixed = []
    while sampler.num_running:
        mixed += sampler.step()
    held = sampler._parameters
    shards = {n: p.data[: held._rows[n]] for n, p in held._parameters.items()}
    faults = []
    short = dict(shards)
    short["model.norm.weight"] = short["model.norm.weight"][:-1]
    missing = {n: t for n, t in shards.items() if "layers.0.mlp.down_proj" not in n}
    for wrong in (short, missing, {**shards, "model.more": torch.zeros(1)}):
        try:
            sampler.adopt(wrong, 9)
        except RlctlError as error:
            faults.append(error.message)
    asleep = sampler.version
    return {
        "straight": plain(straight), "parts": plain(parts), "continued": plain(continued),
        "mixed": plain(sorted(mixed, key=lambda o: o.key)), "faults": faults, "asleep": asleep, "weights": weights,
    }  # fmt: skip


def left_alone(seed: int, deadline: float) -> str:
    """Return what rank 0 says when rank 1 ends while both generate."""
    engine = engine_of("qwen2-tied", seed, tp_size=2, dp_size=1, deadline=deadline)
    engine.rollout(PROMPTS, 2)
    sampler = engine.sampler
    assert isinstance(sampler, VllmSampler)
    if dist.get_rank() == 1:
        step, left = sampler.step, iter(range(4))

        def step_or_end() -> list[Output]:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        sampler.step = step_or_end  # type: ignore[method-assign]
    try:
        engine.rollout(PROMPTS, 20)
    except ReshardError as error:
        return error.message
    return "nothing"
