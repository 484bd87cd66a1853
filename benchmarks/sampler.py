"""Tokens per CPU second of the embedded rollout engine against ``model.generate``, at equal work.

64 prompts with the response lengths of the built-in task's trained policy (half of them at most 16 tokens, the longest
160) go through a small Llama with random weights. All sides sample at temperature 1, make exactly the same number of
tokens for every prompt and return the log-prob of each, which is checked against a teacher-forced forward. They take
turns, so that a busy machine slows all, and time is CPU time. ``engine`` is the embedded engine as it runs this model,
``engine-generic`` the same over transformers' own forward, which any other architecture gets.

    python benchmarks/sampler.py [--json] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

# Before torch is imported: idle OpenMP threads that spin would be counted as CPU time of both sides.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, StoppingCriteria, StoppingCriteriaList

from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.embedded.choice import Forward
from rlctl.rollout.embedded.engine import EmbeddedEngine

PROMPTS = 64
PROMPT_TOKENS = 7
LONGEST = 160
TOLERANCE = 1e-5
FLOOR = 2.5


@dataclass(frozen=True)
class Sampled:
    """Responses of one pass: ids and log-probs per prompt, and the CPU seconds they took."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    seconds: float


def make_model(seed: int) -> Any:
    """Return a Llama of the built-in task's size (0.4 million parameters) with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def draw_lengths(generator: torch.Generator) -> list[int]:
    """Return response lengths of the built-in task: 4 + 6k tokens, k Pareto (1.7) of 2 .. 26, half of them k = 2."""
    u = torch.rand(PROMPTS, generator=generator, dtype=torch.float64)
    k = (2 * (1 - u) ** (-1 / 1.7)).floor().clamp(2, 26)
    k[torch.rand(PROMPTS, generator=generator) < 0.5] = 2
    lengths = (4 + 6 * k).long().tolist()
    lengths[-1] = LONGEST  # every draw has its straggler
    return lengths


class StopAtLengths(StoppingCriteria):
    """Ends row i of a batch after ``lengths[i]`` new tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - PROMPT_TOKENS >= self._lengths


def with_generate(model: Any, prompts: Tensor, lengths: list[int]) -> Sampled:
    """Sample with transformers' own loop."""
    start = time.process_time()
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=LONGEST,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([StopAtLengths(lengths)]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[:, PROMPT_TOKENS:]
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    rows = list(zip(ids.tolist(), logprobs.tolist(), lengths, strict=True))
    seconds = time.process_time() - start
    return Sampled([i[:n] for i, _, n in rows], [p[:n] for _, p, n in rows], seconds)


def with_engine(engine: EmbeddedEngine, prompts: Tensor, lengths: list[int], seed: int) -> Sampled:
    """Sample with the embedded engine."""
    start = time.process_time()
    requests = [
        Request(RequestKey(i, 0), tuple(prompt), SamplingParams(max_new_tokens=n), seed)
        for i, (prompt, n) in enumerate(zip(prompts.tolist(), lengths, strict=True))
    ]
    outputs = engine.generate(requests)
    sampled = Sampled([o.token_ids for o in outputs], [o.logprobs for o in outputs], 0.0)
    return Sampled(sampled.ids, sampled.logprobs, time.process_time() - start)


def worst_gap(model: Any, prompts: Tensor, sampled: Sampled) -> float:
    """Return the largest difference between recorded log-probs and a teacher-forced forward."""
    worst = 0.0
    for prompt, ids, logprobs in zip(prompts.tolist(), sampled.ids, sampled.logprobs, strict=True):
        sequence = torch.tensor([prompt + ids])
        expected = model(sequence).logits[0, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
        got = torch.tensor(logprobs)
        worst = max(worst, (expected.gather(1, sequence[0, PROMPT_TOKENS:, None])[:, 0] - got).abs().max().item())
    return worst


def measure(repeats: int, seed: int) -> dict[str, Any]:
    """Run both sides in turn and return the figures."""
    model = make_model(seed)
    engines = {}
    forwards: dict[str, Forward] = {"engine": "fused", "engine-generic": "generic"}
    for name, forward in forwards.items():
        engines[name] = EmbeddedEngine(
            model.config,
            dtype=torch.float32,
            max_slots=PROMPTS,
            max_length=PROMPT_TOKENS + LONGEST,
            forward=forward,
        )
        engines[name].load_weights(model.state_dict().items(), version=0)
    generator = torch.Generator().manual_seed(seed)
    rates: dict[str, list[float]] = {name: [] for name in ("generate", *engines)}
    gaps = dict.fromkeys(rates, 0.0)
    tokens = 0
    for repeat in range(repeats + 1):
        prompts = torch.randint(0, 300, (PROMPTS, PROMPT_TOKENS), generator=generator)
        lengths = draw_lengths(generator)
        sides: dict[str, Callable[[], Sampled]] = {"generate": partial(with_generate, model, prompts, lengths)}
        for name, engine in engines.items():
            sides[name] = partial(with_engine, engine, prompts, lengths, seed + repeat)
        for name, side in sides.items():
            sampled = side()
            assert [len(ids) for ids in sampled.ids] == lengths, f"{name} did not do the work asked for"
            gaps[name] = max(gaps[name], worst_gap(model, prompts, sampled))
            if repeat:  # the first turn warms both up
                rates[name].append(sum(lengths) / sampled.seconds)
        tokens += sum(lengths) if repeat else 0
    ratios = {name: [e / g for e, g in zip(rates[name], rates["generate"], strict=True)] for name in engines}
    return {
        "schema": "rlctl.benchmark.sampler/1",
        "torch_threads": torch.get_num_threads(),
        "repeats": repeats,
        "tokens": tokens,
        "tokens_per_cpu_s": {name: statistics.median(r) for name, r in rates.items()},
        "ratio": {n: {"median": statistics.median(r), "min": min(r), "max": max(r)} for n, r in ratios.items()},
        "logprob_gap": gaps,
        "passed": statistics.median(ratios["engine"]) >= FLOOR and max(gaps.values()) <= TOLERANCE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=9, help="measured turns of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the model is best on one")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        figures = measure(args.repeats, args.seed)
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"{'sampler':<16}{'tokens per CPU s':>18}{'against generate':>24}{'log-prob gap':>16}")
        for name, rate in figures["tokens_per_cpu_s"].items():
            ratio = figures["ratio"].get(name)
            versus = f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else ""
            print(f"{name:<16}{rate:>18,.0f}{versus:>24}{figures['logprob_gap'][name]:>16.1e}")
        print(f"wanted: engine at least {FLOOR}x, gaps up to {TOLERANCE:.0e}: {'yes' if figures['passed'] else 'NO'}")
    return 0 if figures["passed"] else 4


if __name__ == "__main__":
    raise SystemExit(main())
