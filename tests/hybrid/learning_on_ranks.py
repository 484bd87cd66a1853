"""Learning the cycle task: on ranks by a hybrid engine, in one process by the plain engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl import HybridEngine
from rlctl.algorithms.advantages import group_relative
from rlctl.algorithms.objective import Objective
from rlctl.experience.segments import RequestKey
from rlctl.hybrid.rollout import Response, Rollout
from rlctl.model.base import LossSpec
from rlctl.model.local import LocalEngine
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.schema.training import OptimizerConfig
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.cycle import CycleTask

PATH = builtin_model_path("cycle-tiny")
PROMPTS, SAMPLES, LONGEST = 16, 8, 128
LOSS = LossSpec(Objective("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "token-mean", LONGEST)
OPTIMIZER = OptimizerConfig(lr=1e-4)

Generate = Callable[[list[str], int], Rollout]
Learn = Callable[[Rollout, list[float]], None]


def learn(steps: int, generate: Generate, update: Learn) -> list[float]:
    """Return the mean reward of each step."""
    task, found = CycleTask(), []
    for step in range(steps):
        first = PROMPTS * step
        problems = [task.sample(first + i) for i in range(PROMPTS)]
        made = generate([p.prompt for p in problems], first)
        rewards = torch.tensor([task.score(problems[i // SAMPLES], text) for i, text in enumerate(made.texts)])
        groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        update(made, group_relative(rewards, groups, normalize_std=True).tolist())
        found.append(float(rewards.mean()))
    return found


def on_ranks(steps: int, seed: int) -> list[float]:
    engine = HybridEngine(
        AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32), AutoTokenizer.from_pretrained(PATH),
        tp_size=2, dp_size=2, optimizer=OPTIMIZER, loss=LOSS, max_length=256, max_slots=64, seed=seed,
    )  # fmt: skip

    def update(made: Rollout, advantages: list[float]) -> None:
        engine.switch_to_training()
        engine.compute_loss(made.batch(advantages)).backward()
        engine.optimizer.step()
        engine.switch_to_rollout()

    return learn(
        steps, lambda prompts, first: engine.rollout(prompts, LONGEST, samples=SAMPLES, first_ordinal=first), update
    )


def in_one_process(steps: int, seed: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    trained = LocalEngine(AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32), OPTIMIZER)
    sampler = EmbeddedEngine(PATH, dtype=torch.float32, max_length=256)
    params = SamplingParams(LONGEST, stop_token_ids=(tokenizer.eos_token_id,))

    def generate(prompts: list[str], first: int) -> Rollout:
        assert sampler.load_weights(trained.per_tensor_params(), first).complete
        requests = [
            Request(RequestKey(first + i, sample), tuple(tokenizer.encode(prompt)), params, seed)
            for i, prompt in enumerate(prompts)
            for sample in range(SAMPLES)
        ]
        made = [
            Response(o.key, list(r.prompt_ids), o.token_ids, o.logprobs, "stop", first)
            for r, o in zip(requests, sampler.generate(requests), strict=True)
        ]
        return Rollout(made, [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in made])

    return learn(steps, generate, lambda made, advantages: trained.update(made.batch(advantages), LOSS) and None)
