"""LoRA against all weights on the built-in task, 2 seeds, and the final adapter in PEFT and in vLLM.

    python benchmarks/lora_parity.py [STEPS]

Bounds: mean rewards of the last 20 steps differ by at most 0.02; runs that are sent the adapter alone end with the
digests of those that are sent merged weights; log-probs of what the adapter answers to 64 held-out prompts are the
trainer's to 1e-5 (float32), in PEFT and, where it is installed, in vLLM. Exit 1 when one is missed.
"""

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

# vLLM reads these when it is imported: one process, nothing compiled, no spinning threads.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from rlctl.config import to_json
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.ops.resolve import resolve
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.registry import load_task

STEPS = sys.argv[1] if len(sys.argv) > 1 else "40"
BASE = ["run.validate_prompts=0", "run.threads=1", f"run.steps={STEPS}"]
SETTINGS = {
    "all weights": ["trainer.optimizer.lr=2e-4"],
    "rank 8": ["trainer.optimizer.lr=1e-3", "model.lora.rank=8"],
    "rank 8, adapter sent alone": ["trainer.optimizer.lr=1e-3", "model.lora.rank=8", "model.lora.sync=adapter"],
}
MODEL = builtin_model_path("cycle-tiny")


def train(words: list[str], seed: int) -> dict:
    plan = resolve(env={}, overrides=[*BASE, *words, f"run.seed={seed}"])
    plan.require_valid()
    run = RunPath(Path(tempfile.mkdtemp()) / "run", resume=False)
    begin = time.process_time()
    result = run_training(plan.config, run, document=to_json(plan.resolved))
    return result | {"cpu": time.process_time() - begin}


def trainer_of(result: dict):
    """Return the engine as training left it: its digest is that of the run."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlctl.model.lora import LoraEngine
    from rlctl.schema.training import OptimizerConfig
    from rlctl.schema.work import LoraConfig

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    lora = LoraConfig(rank=8, adapter=result["final"])
    engine = LoraEngine(model, OptimizerConfig(), lora=lora, seed=0, base=str(MODEL))
    assert engine.params_digest() == result["params_digest"]
    return engine


def in_peft(result: dict, prompts: list[list[int]]) -> list[Row]:
    """Return greedy answers with the log-probs of transformers under PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, result["final"]).eval()
    rows = []
    for place, prompt in enumerate(prompts):
        with torch.no_grad():
            ids = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
            logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        answer = ids[len(prompt) :]
        logprobs = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]
        rows.append(row(place, prompt, answer, logprobs.numpy()))
    return rows


def in_vllm(results: list[dict], prompts: list[list[int]]) -> list[list[Row]]:
    """Return, for each adapter, greedy answers with vLLM's log-probs."""
    import vllm
    from vllm.lora.request import LoRARequest

    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 128}
    settings |= {"kv_cache_memory_bytes": 16 << 20, "enable_lora": True, "max_lora_rank": 8, "disable_log_stats": True}
    llm = vllm.LLM(str(MODEL), **settings)
    params = vllm.SamplingParams(max_tokens=24, logprobs=0, temperature=0, detokenize=False)
    found = []
    for number, result in enumerate(results, 1):
        request = LoRARequest(f"seed {number}", number, result["final"])
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        rows = []
        for place, output in enumerate(llm.generate(asked, params, lora_request=request, use_tqdm=False)):
            (one,) = output.outputs
            values = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            rows.append(row(place, prompts[place], list(one.token_ids), np.array(values, np.float32)))
        found.append(rows)
    return found


def row(place: int, prompt: list[int], answer: list[int], logprobs: np.ndarray) -> Row:
    return Row(RequestKey(place, 0), place, prompt, answer, 0.0, logprobs, np.zeros(len(answer), np.int64))


def gap(engine, rows: list[Row]) -> float:
    mine = engine.log_probs(rows, temperature=1.0)
    return max(float(np.abs(a - r.rollout_logprobs).max()) for a, r in zip(mine, rows, strict=True))


def main() -> int:
    missed = 0
    ended: dict[str, list[dict]] = {}
    for seed in (0, 1):
        for name, words in SETTINGS.items():
            result = train(words, seed)
            ended.setdefault(name, []).append(result)
            curve = result["reward"]["curve"]
            reached = next((step for step, value in enumerate(curve, 1) if value >= 0.85), 0)
            print(
                f"seed {seed}  {name:27}  reward {result['reward']['first']:.3f} -> {result['reward']['last']:.4f}  "
                f"0.85 at step {reached:2}  {result['cpu']:3.0f} CPU s  {result['params_digest'][:12]}",
                flush=True,
            )
    whole, adapters, alone = ended.values()
    for one, other, third in zip(whole, adapters, alone, strict=True):
        missed += abs(one["reward"]["last"] - other["reward"]["last"]) > 0.02
        missed += other["params_digest"] != third["params_digest"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    held_out = load_task("cycle", held_out=0.1, seed=0).held_out(64)
    prompts = [tokenizer(sample.prompt).input_ids for sample in held_out]
    engines = [trainer_of(result) for result in adapters]
    gaps = {"peft": [gap(engine, in_peft(result, prompts)) for engine, result in zip(engines, adapters, strict=True)]}
    if importlib.util.find_spec("vllm") is not None:
        served = in_vllm(adapters, prompts)
        gaps["vllm"] = [gap(engine, rows) for engine, rows in zip(engines, served, strict=True)]
    for where, values in gaps.items():
        print(f"{where}: largest gap to the trainer's log-probs, by seed: {', '.join(f'{v:.1e}' for v in values)}")
        missed += max(values) > 1e-5
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
