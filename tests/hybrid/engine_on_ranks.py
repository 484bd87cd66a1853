"""What ranks do with a hybrid engine in the tests."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlctl import HybridEngine
from rlctl.algorithms.objective import Objective
from rlctl.experience.rows import Row
from rlctl.model.base import LossSpec
from rlctl.model.fsdp2.optimizing import ShardedOptimizing
from rlctl.model.memory_settings import Memory
from rlctl.schema.training import OptimizerConfig
from tests.hybrid.tp.sampling_on_ranks import MODELS
from tests.model.tiny import logprobs_of, random_rows
from tests.rollout.tiny import make_model

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)
LOSS = LossSpec(
    Objective("ppo_clip", {"clip_low": 0.2}, kl="k3", kl_coef=0.1, entropy_coef=0.01), "token-mean", 20, 0.8
)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3]]


def recorded_rows(name: str, seed: int, count: int = 9) -> list[Row]:
    """Return rows whose tokens are given, with old and reference log-probs of policies near the model's."""
    random.seed(seed)
    noise, rows = np.random.default_rng(seed), random_rows(count)
    for row, logprobs in zip(rows, logprobs_of(make_model(MODELS[name], seed), rows), strict=True):
        size = len(row.response_ids)
        row.rollout_logprobs = logprobs
        row.old_logprobs, row.ref_logprobs = (
            (logprobs + noise.normal(0, 0.2, size)).astype(np.float32) for _ in range(2)
        )
        row.mask[size - size // 3 :] = False
    return rows


def engine_of(name: str, seed: int, *, offload: bool = False, **options: Any) -> HybridEngine:
    model = make_model(MODELS[name], seed)
    if offload:
        options["memory"] = Memory(offload_params=True, offload_optimizer=True)
    chosen = {
        "tp_size": 2,
        "dp_size": 2,
        "optimizer": OPTIMIZER,
        "loss": LOSS,
        "max_length": 128,
        "seed": seed,
        **options,
    }
    return HybridEngine(model.requires_grad_(True), None, **chosen)


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode() + tensor.detach().clone().numpy().tobytes())  # numpy pins a storage
    return found.hexdigest()


def whole(engine: HybridEngine) -> dict[str, list[float]]:
    """Return every parameter, gathered."""
    shards = engine.training.shards
    return {name: shards.gather(name, shards.local(name)).flatten().tolist() for name in shards.names()}


def state_digest(engine: HybridEngine) -> str:
    shards = engine.training.shards
    state = engine.optimizer.state_dict()
    moments = [(kind + name, part) for kind in ("exp_avg", "exp_avg_sq") for name, part in state[kind].items()]
    assert moments
    return digest([*moments, *((name, shards.local(name)) for name in shards.names())])


def one_step(name: str, seed: int, training: str, switches: bool, delta: bool = False) -> dict[str, Any]:
    """Score and learn recorded rows by one SGD step, generating in between."""
    engine = engine_of(name, seed, training_parallel=training, delta=delta)
    rows = recorded_rows(name, seed)
    if switches:
        engine.rollout(PROMPTS, 4)
        engine.switch_to_training()
    logprobs = engine.training.log_probs(rows, temperature=LOSS.temperature)
    loss = engine.compute_loss(rows)
    loss.backward()
    norm = engine.optimizer.clip_grad_norm_(float("inf"))
    torch.optim.SGD(engine.parameters(), lr=0.1, foreach=False).step()
    stepped = whole(engine)
    if switches:
        engine.switch_to_rollout()
    return {"loss": loss.item(), "norm": norm, "logprobs": [p.tolist() for p in logprobs], "params": stepped}


def generate_after_updates(name: str, seed: int, **options: Any) -> dict[str, Any]:
    """Update and generate in turn; return tokens, weights and what was reported."""
    engine = engine_of(name, seed, **options)
    engine.enable_profiling()
    made = []
    for step in range(2):
        engine.update(recorded_rows(name, seed + step))
        expected = whole(engine)
        found = engine.rollout(PROMPTS, 8, samples=2, first_ordinal=10 * step)
        again = engine.rollout(PROMPTS, 8, samples=2, first_ordinal=10 * step)
        assert [r.token_ids for r in found.responses] == [r.token_ids for r in again.responses]
        made.append([[list(r.key), r.token_ids, r.logprobs, r.version] for r in found.responses])
    report = engine.get_communication_report()
    room = sum(tensor.nbytes for tensor in engine.sampler._decoder._weights._shards.values())
    wanted = int(engine.plan.wanted[engine.plan.placement.rollout.index(dist.get_rank())])
    return {"made": made, "params": expected, "report": report, "zeros": room - wanted}


def many_switches(name: str, seed: int, count: int, **options: Any) -> dict[str, Any]:
    """Switch ``count`` times; say whether anything of training changed."""
    engine = engine_of(name, seed, **options)
    rows = recorded_rows(name, seed)
    engine.update(rows)
    before, losses = state_digest(engine), [engine.compute_loss(rows).item()]
    for number in range(count // 2):
        engine.switch_to_rollout()
        if number % 10 == 0:
            engine.rollout(PROMPTS, 3)
        engine.switch_to_training()
        if number % 5 == 0:
            losses.append(engine.compute_loss(rows).item())
    with torch.no_grad():
        losses.append(engine.compute_loss(rows).item())
    after = state_digest(engine)
    engine.update(rows)
    with torch.no_grad():
        changed = engine.compute_loss(rows).item()
    return {"same": before == after, "losses": losses, "changed": changed, "updates": engine.optimizer.updates}


def reward_in_between(name: str, seed: int) -> dict[str, Any]:
    engine = engine_of(name, seed)
    engine.enable_profiling()
    first = engine.rollout(PROMPTS, 6, first_ordinal=0)
    sampler = engine.sampler
    at = [t.data_ptr() for t in sampler._decoder.named_weights().values()]
    engine.switch_mode("reward")
    cache = sampler._decoder._keys.nbytes
    second = engine.rollout(PROMPTS, 6, first_ordinal=0)
    engine.switch_to_rollout()
    assert at == [t.data_ptr() for t in sampler._decoder.named_weights().values()]
    engine.switch_to_training()
    engine.switch_to_training()
    return {
        "same": [r.token_ids for r in first.responses] == [r.token_ids for r in second.responses],
        "cache": cache,
        "switches": [[s["to"], s["total_bytes"]] for s in engine.get_communication_report()["switches"]],
        "planned": engine.plan.bytes_moved,
        "weights_left": sampler.version,
    }


def dict_of_tensors(name: str, seed: int) -> list[float]:
    """Return the losses of rows, of the same as tensors, and of tensors without advantages beside their entropy."""
    loss = LossSpec(Objective("ppo_clip"), "token-mean", 20)
    engine = engine_of(name, seed, loss=loss)
    rows = recorded_rows(name, seed, 5)
    longest = max(row.length for row in rows)
    shape = (len(rows), longest)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": torch.zeros(shape),
        "response_mask": torch.zeros(shape, dtype=torch.bool), "advantages": torch.zeros(len(rows)),
        "old_logprobs": torch.zeros(shape),
    }  # fmt: skip
    for i, row in enumerate(rows):
        row.old_logprobs = np.full(len(row.response_ids), -3.0, np.float32)
        first = 0 if i % 2 else longest - row.length  # padding on the right, or on the left
        batch["input_ids"][i, first : first + row.length] = torch.tensor(row.prompt_ids + row.response_ids)
        batch["attention_mask"][i, first : first + row.length] = 1
        start = first + len(row.prompt_ids)
        batch["response_mask"][i, start : start + len(row.response_ids)] = torch.from_numpy(row.mask)
        batch["advantages"][i] = float(row.advantages[0])
        batch["old_logprobs"][i, start : start + len(row.response_ids)] = -3.0
    with torch.no_grad():
        found = [engine.compute_loss(rows).item(), engine.compute_loss(batch).item()]
        del batch["advantages"], batch["old_logprobs"]
        found.append(engine.compute_loss(batch).item())
    logprobs = engine.training.log_probs(rows, temperature=1.0)
    chosen = np.concatenate([p[row.mask] for p, row in zip(logprobs, rows, strict=True)])
    return [*found, float(-chosen.mean())]


def refusals(name: str) -> list[str]:
    """Return what wrong arguments and calls in the wrong mode are answered."""
    found = []

    def attempt(act: Any) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")

    attempt(lambda: engine_of(name, 1, tp_size=3))
    attempt(lambda: engine_of(name, 1, training_parallel="dp+fdsp"))
    engine = engine_of(name, 1)
    attempt(lambda: engine.switch_mode("trainig"))
    attempt(engine.get_communication_report)
    attempt(lambda: engine.sampler)
    engine.switch_to_rollout()
    attempt(engine.optimizer.step)
    attempt(lambda: engine.compute_loss({"input_ids": torch.zeros(1, 2)}))
    attempt(lambda: engine.compute_loss([]))
    assert isinstance(engine.optimizer._optimizing, ShardedOptimizing)
    return found
