"""Samples per CPU second of `rlctl train` against TRL's GRPOTrainer, at the same learning per step.

Both start from the weights of the built-in model and train on the built-in task: the same prompts in the same order,
16 x 8 samples a step, the same loss (token mean, clip 0.2 / 0.28, no KL, advantages by group mean and deviation), AdamW
(fused), rate, clipping of gradients, temperature and longest response, float32, one thread. rlctl has on what it has by
default: events, metrics, a checkpoint each ten steps, syncs verified in full. TRL saves, prints and logs nothing, takes
the prompts as text with the chat template applied, and generates the whole batch at once with a KV cache. Every run is
a process of its own and the sides take turns. CPU seconds are those of the process and its children, from the begin of
the first step to the end of the last one (for rlctl to the end of the checkpoint after it); "program" counts start,
imports, and for rlctl both evaluations and the saved model.

    python benchmarks/train_vs_trl.py [--pairs 5] [--steps 30] [--json]

Exits 4 below 2x, or when the mean rewards of the last ten steps differ by more than 0.05 over all pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

FLOOR, ALIKE, LAST = 2.0, 0.05, 10
PROMPTS, SAMPLES, LONGEST = 16, 8, 192
SIDES = ("rlctl", "trl")


def tree_seconds() -> float:
    """Return the CPU seconds of this process and of its children, those that ended and those that run."""
    import psutil

    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(s.ru_utime + s.ru_stime for s in spent) + sum(sum(times[:4]) for times in alive)


class Window:
    """CPU and wall seconds from the first ``begin`` to the last ``end``."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] | None = None
        self.cpu = self.wall = 0.0

    def begin(self) -> None:
        if self._begin is None:
            self._begin = tree_seconds(), time.perf_counter()

    def end(self) -> None:
        assert self._begin is not None
        self.cpu, self.wall = tree_seconds() - self._begin[0], time.perf_counter() - self._begin[1]


def train_rlctl(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with rlctl as it comes."""
    from rlctl.config import to_json
    from rlctl.experience.events import Checkpointed, Event, Hook, StepEnded
    from rlctl.ops.resolve import resolve
    from rlctl.ops.run_path import RunPath
    from rlctl.ops.train import run_training

    window, tokens = Window(), [0.0]

    def listen(event: Event) -> None:
        if isinstance(event, Hook) and event.name == "on_train_begin":
            window.begin()
        elif isinstance(event, StepEnded):
            tokens[0] += event.figures["generated_tokens"]
        if isinstance(event, StepEnded | Checkpointed) and event.step == options.steps:
            window.end()

    words = [f"run.seed={seed}", f"run.steps={options.steps}", f"run.threads={options.threads}"]
    words += [f"trainer.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"]
    plan = resolve(env={}, overrides=[*words, f"rollout.max_new_tokens={LONGEST}"])
    plan.require_valid()
    run = RunPath(folder / "run", resume=False)
    result = run_training(plan.config, run, document=to_json(plan.resolved), listeners=[listen])
    return {"cpu_s": window.cpu, "wall_s": window.wall, "rewards": result["reward"]["curve"], "tokens": int(tokens[0])}


def train_trl(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with TRL on the prompts that rlctl takes for ``seed``."""
    import torch

    torch.set_num_threads(options.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from rlctl.tasks.builtin_models import builtin_model_path
    from rlctl.tasks.cursor import PromptCursor
    from rlctl.tasks.cycle import CycleTask
    from rlctl.tasks.prompts import prompt_ids

    logging.set_verbosity_error()
    source = str(builtin_model_path("cycle-tiny"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    task, window = CycleTask(), Window()
    samples = [sample for _, sample in PromptCursor(task, seed).take(options.steps * PROMPTS)]

    def templated(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    texts = [templated(sample.prompt) for sample in samples]
    assert tokenizer(text=texts)["input_ids"] == [prompt_ids(tokenizer, sample) for sample in samples]
    rewards: list[float] = []
    tokens = [0]

    def score(completions: list[str], completion_ids: list[list[int]], place: list[int], **_: Any) -> list[float]:
        scores = [task.score(samples[p], text) for p, text in zip(place, completions, strict=True)]
        rewards.append(sum(scores) / len(scores))
        tokens[0] += sum(map(len, completion_ids))
        return scores

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            window.begin()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == options.steps:
                window.end()

    pieces = options.trl_pieces
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES // pieces,
        gradient_accumulation_steps=pieces,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        max_steps=options.steps,
        shuffle_dataset=False,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        generation_kwargs=options.trl_generation,
    )
    rows = Dataset.from_list([{"prompt": text, "place": place} for place, text in enumerate(texts)])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    return {"cpu_s": window.cpu, "wall_s": window.wall, "rewards": rewards, "tokens": tokens[0]}


def run_side(side: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own and return its figures."""
    words = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--seed", str(seed)]
    for name in ("steps", "threads", "trl_pieces"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.trl_generation:
        words += ["--trl-generation", json.dumps(options.trl_generation)]
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "figures.json")
        words += ["--out", str(out)]
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, env=environment, cwd=scratch, timeout=1800
        )
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["program_cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures["samples"] = options.steps * PROMPTS * SAMPLES
    figures["samples_per_cpu_s"] = figures["samples"] / figures["cpu_s"]
    figures["reward_mean"] = statistics.fmean(figures["rewards"])
    figures["reward_last"] = statistics.fmean(figures["rewards"][-LAST:])
    assert len(figures["rewards"]) == options.steps, f"{side} made {len(figures['rewards'])} steps"
    return figures | {"side": side, "seed": seed, "load": os.getloadavg()[0]}


def contest(options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all pairs in turn and return the document."""
    pairs = []
    for seed in range(options.pairs):
        pair = {}
        for side in SIDES:
            pair[side] = run_side(side, seed, options)
            tell(pair[side])
        pairs.append(pair)
    ratios = [pair["rlctl"]["samples_per_cpu_s"] / pair["trl"]["samples_per_cpu_s"] for pair in pairs]
    program = [pair["trl"]["program_cpu_s"] / pair["rlctl"]["program_cpu_s"] for pair in pairs]
    gaps = {
        name: [pair["rlctl"][name] - pair["trl"][name] for pair in pairs] for name in ("reward_mean", "reward_last")
    }
    curves = {}
    for side in SIDES:
        each_run = [pair[side]["rewards"] for pair in pairs]
        curves[side] = [statistics.fmean(step) for step in zip(*each_run, strict=True)]
    ratio, gap = statistics.median(ratios), statistics.fmean(gaps["reward_last"])
    return {
        "schema": "rlctl.benchmark.train_vs_trl/1",
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "steps": options.steps,
        "threads": options.threads,
        "ratio": {"median": ratio, "min": min(ratios), "max": max(ratios), "pairs": ratios},
        "program_ratio": {"median": statistics.median(program), "min": min(program), "max": max(program)},
        "reward_gap": {name: {"mean": statistics.fmean(found), "pairs": found} for name, found in gaps.items()},
        "curves": curves,
        "passed": ratio >= FLOOR and abs(gap) <= ALIKE,
        "runs": [pair[side] for pair in pairs for side in SIDES],
    }


def show(figures: dict[str, Any]) -> None:
    """Print one run as a line."""
    print(
        f"{figures['side']:<7}{figures['seed']:>4}{figures['samples_per_cpu_s']:>18.0f}{figures['cpu_s']:>9.2f}"
        f"{figures['wall_s']:>9.1f}{figures['program_cpu_s']:>15.1f}{figures['tokens']:>9}"
        f"{figures['reward_mean']:>13.3f}{figures['reward_last']:>13.3f}{figures['load']:>7.1f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side; the pair's number is the seed of both")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-pieces", type=int, default=1, help="micro-batches of TRL's step")
    parser.add_argument("--trl-generation", type=json.loads, help="JSON of TRL's generation_kwargs")
    parser.add_argument("--side", choices=SIDES, help="run one side here")
    parser.add_argument("--seed", type=int, default=0, help="with --side")
    parser.add_argument("--out", type=Path, help="with --side: where its figures go")
    options = parser.parse_args()
    if options.side:
        train = {"rlctl": train_rlctl, "trl": train_trl}[options.side]
        options.out.write_text(json.dumps(train(options.seed, options, options.out.parent)))
        return 0
    if not options.json:
        print(
            f"{'side':<7}{'seed':>4}{'samples per CPU s':>18}{'CPU s':>9}{'wall s':>9}{'program CPU s':>15}"
            f"{'tokens':>9}{'mean reward':>13}{'last ten':>13}{'load':>7}"
        )
    found = contest(options, (lambda _: None) if options.json else show)
    if options.json:
        print(json.dumps(found))
    else:
        print("\nmean reward by step  " + "  ".join(f"{side:>7}" for side in SIDES))
        for step, values in enumerate(zip(*found["curves"].values(), strict=True), 1):
            print(f"{step:>19}  " + "  ".join(f"{value:>7.3f}" for value in values))
        ratio, program = found["ratio"], found["program_ratio"]
        print(
            f"\nsamples per CPU second, rlctl over TRL: {ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f});"
            f" of the whole program {program['median']:.2f}x ({program['min']:.2f}-{program['max']:.2f})\n"
            f"mean reward of the last ten steps, rlctl less TRL: {found['reward_gap']['reward_last']['mean']:+.3f};"
            f" of all {found['reward_gap']['reward_mean']['mean']:+.3f}\n"
            f"wanted: at least {FLOOR:g}x, last ten within {ALIKE:g}: {'yes' if found['passed'] else 'NO'}"
        )
    return 0 if found["passed"] else 4


if __name__ == "__main__":
    raise SystemExit(main())
