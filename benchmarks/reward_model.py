"""A reward model is trained on what the built-in model answers, then a policy learns from its scores alone.

    PYTHONPATH=. python benchmarks/reward_model.py [KEY=VALUE ...]

The built-in model answers 3072 prompts at temperature 1 and the task judges the answers; a copy of the model with a
head of one output learns to tell right from wrong. The run counts its scores only (``reward_model.task_weight=0``);
the task's own reward and the held-out accuracy, which the policy never sees, say whether it learned. Bound: held-out
accuracy of at least 0.7 after 40 steps (0.20 before); exit 1 when it is missed.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rlctl.config import to_json
from rlctl.experience.segments import RequestKey
from rlctl.model.loading import load_model, quiet_transformers
from rlctl.ops.resolve import resolve
from rlctl.ops.run_path import RunPath
from rlctl.ops.train import run_training
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.embedded.engine import EmbeddedEngine
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.cycle import CycleTask
from rlctl.tasks.prompts import decode_response, encode_prompt

RESPONSES, HELD_OUT = 3072, 512
STEPS, ROWS, RATE = 200, 64, 1e-3
BOUND = 0.7
SETTINGS = {
    "reward_model.task_weight": "0",
    "reward_model.normalize": "sigmoid",
    "trainer.optimizer.lr": "2e-4",
    "run.steps": "40",
    "run.threads": "1",
}
Judged = list[tuple[list[int], float]]


def judged_answers(model: Any, tokenizer: Any) -> Judged:
    """Return token ids of prompt and answer, and the task's verdict, for the first prompts of the task."""
    task, stop = CycleTask(), (tokenizer.eos_token_id,)
    engine = EmbeddedEngine(model.config, dtype=torch.float32, max_slots=128, max_length=256)
    engine.load_weights(((name, p.detach()) for name, p in model.state_dict().items()), 0)
    samples = [task.sample(1_000_000 + index) for index in range(RESPONSES)]
    params = SamplingParams(max_new_tokens=192, stop_token_ids=stop)
    prompts = [encode_prompt(tokenizer, sample, 64) for sample in samples]
    outputs = engine.generate(
        [Request(RequestKey(index, 0), tuple(ids), params, 7) for index, ids in enumerate(prompts)]
    )
    engine.close()
    return [
        (ids + output.token_ids, task.score(sample, decode_response(tokenizer, output.token_ids, stop)))
        for sample, ids, output in zip(samples, prompts, outputs, strict=True)
    ]


def scores_of(model: Any, batch: Judged, pad: int) -> torch.Tensor:
    """Return the score of each answer."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
    scores: torch.Tensor = model(input_ids=ids, attention_mask=(ids != pad).long()).logits[:, 0]
    return scores


def train_classifier(folder: Path) -> float:
    """Write the reward model into ``folder`` and return how often it puts a right held-out answer above a wrong one."""
    source = str(builtin_model_path("cycle-tiny"))
    loaded = load_model(source, trust_remote_code=False)
    answers, pad = judged_answers(loaded.model, loaded.tokenizer), loaded.tokenizer.pad_token_id
    print(f"{RESPONSES} answers, {sum(right for _, right in answers) / RESPONSES:.3f} of them right", flush=True)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    known = answers[HELD_OUT:]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / STEPS)
        batch = [known[i] for i in torch.randint(len(known), (ROWS,)).tolist()]
        labels = torch.tensor([right for _, right in batch])
        torch.nn.functional.binary_cross_entropy_with_logits(scores_of(model, batch, pad), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    with torch.no_grad():
        scores = scores_of(model, answers[:HELD_OUT], pad)
    right = torch.tensor([right for _, right in answers[:HELD_OUT]]).bool()
    return float((scores[right][:, None] > scores[~right][None]).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet_transformers()
    place, begin = Path(tempfile.mkdtemp()), time.process_time()
    accuracy = train_classifier(place / "reward-model")
    print(f"classifier: auc {accuracy:.3f} on held-out responses, {time.process_time() - begin:.0f} CPU s", flush=True)
    begin = time.process_time()
    settings = SETTINGS | dict(word.split("=", 1) for word in sys.argv[1:])
    settings["reward_model.path"] = str(place / "reward-model")
    plan = resolve(env={}, overrides=[f"{key}={value}" for key, value in settings.items()])
    plan.require_valid()
    result = run_training(plan.config, RunPath(place / "run", resume=False), document=to_json(plan.resolved))
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    task = [line["task_reward"] for line in lines]
    scoring = sum(line["reward_model/seconds"] for line in lines) / sum(line["seconds"] for line in lines)
    print(f"the task's own reward {sum(task[:3]) / 3:.3f} -> {sum(task[-20:]) / 20:.3f}")
    before, after = result["eval"]["before"], result["eval"]["after"]
    print(
        f"score {result['reward']['first']:.3f} -> {result['reward']['last']:.3f}; held-out accuracy {before:.3f} -> "
        f"{after:.3f}; {time.process_time() - begin:.0f} CPU s; scoring took {scoring:.0%} of the steps' time",
        flush=True,
    )
    sys.exit(after < BOUND)
