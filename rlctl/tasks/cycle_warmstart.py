"""Make the built-in model from nothing: ``python -m rlctl.tasks.cycle_warmstart OUT_DIR``.

One thread, a fixed seed and counted random numbers: the same torch build on the same kind of CPU writes the same bytes.
A curriculum over the number of operations teaches exact traces; a last stage then hides the skill: the model answers
with a random digit nine times out of ten, which is what reinforcement learning is to undo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlctl.tasks import cycle
from rlctl.tasks.base import is_held_out
from rlctl.tasks.counter import draw, uniform
from rlctl.tasks.cycle_tokenizer import build_tokenizer

Report = Callable[[str], object]

SEED = 17
WARMUP_STEPS = 10
BATCH_TOKENS = 3500
LABEL_NOISE = 0.003
"""Share of digits in a trace that are drawn at random, so that sampling is not perfect from the start."""
LOSS_SCALE = 1000.0
"""The summed loss is divided by a constant: a mean would weigh the few long rows and the many short ones apart."""
CHUNKS = 4


@dataclass(frozen=True)
class Stage:
    """``steps`` batches with up to ``max_k`` operations.

    Attributes:
        think: share of the answers that are traces.
        rehearse: share of the rows that are traces whose ``<think>`` is given, not learned.
        lr: learning rate at the first and at the last step, linear between; the higher that of the last stage, the
            longer reinforcement learning takes to bring the skill back.
    """

    max_k: int
    steps: int
    think: float = 1.0
    rehearse: float = 0.0
    lr: tuple[float, float] = (3e-3, 3e-3)


STAGES = (
    Stage(4, 120),
    Stage(8, 80),
    Stage(14, 80),
    Stage(26, 380, lr=(3e-3, 9e-4)),
    Stage(26, 160, think=0.085, rehearse=0.3, lr=(3e-4, 2e-5)),
)


def rows_of(stage: Stage, number: int, seed: int = SEED) -> list[tuple[str, str]]:
    """Return the (prompt, response) pairs of batch ``number``: about BATCH_TOKENS tokens, no held-out prompt.

    Traces and direct digits take turns in fixed shares, so that no batch teaches a preference by chance.
    """
    rows: list[tuple[str, str]] = []
    tokens = i = 0
    thoughts, digit = uniform(seed, number), draw(seed, number)
    while tokens < BATCH_TOKENS:
        key = (seed, number, i)
        i += 1
        k = 2 + draw(*key, 0) % (stage.max_k - 1) if draw(*key, 1) % 2 else cycle.pareto_k(uniform(*key, 2))
        prompt = cycle.prompt_text(draw(*key, 3) % cycle.PROBLEMS_PER_K, min(k, cycle.MAX_K))
        if k > stage.max_k or is_held_out(prompt, cycle.HELD_OUT):
            continue
        rehearsed = uniform(*key, 4) < stage.rehearse
        thoughts += 0 if rehearsed else stage.think
        if rehearsed or thoughts >= 1:
            thoughts -= not rehearsed
            response = _noisy(cycle.trace(prompt), key)
            if rehearsed:
                prompt, response = prompt + "<think>", response.removeprefix("<think>")
            tokens += 10 + 6 * k
        else:
            digit += 1
            response = str(digit % 10)
            tokens += 8
        rows.append((prompt, response))
    return rows


def _noisy(trace: str, key: tuple[int, ...]) -> str:
    """Replace a few of the results in ``trace`` by random digits."""
    letters = list(trace)
    for position, letter in enumerate(letters):
        if letters[position - 1] == "=" and letter.isdigit() and uniform(*key, 5, position) < LABEL_NOISE:
            letters[position] = str(draw(*key, 6, position) % 10)
    return "".join(letters)


def chunks_of(rows: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the rows in up to CHUNKS groups of similar length and a similar number of tokens."""
    ordered = sorted(rows, key=lambda row: len(row[1]))
    total = sum(len(p) + len(r) for p, r in ordered)
    chunk: list[tuple[str, str]] = []
    held = 0
    for prompt, response in ordered:
        chunk.append((prompt, response))
        held += len(prompt) + len(response)
        if held * CHUNKS >= total:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def make_model(tokenizer: Any, seed: int = SEED) -> Any:
    """Return the untrained LlamaForCausalLM (0.43 M parameters, fp32)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def train(model: Any, tokenizer: Any, stages: Sequence[Stage] = STAGES, report: Report | None = None) -> None:
    """Run the curriculum on ``model`` in place; each stage has an optimizer of its own with a short warm-up."""
    import torch

    number = 0
    for stage in stages:
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        first, last = stage.lr
        for i in range(stage.steps):
            rate = first + (last - first) * i / stage.steps
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (i + 1) / WARMUP_STEPS)
            total = 0.0
            for chunk in chunks_of(rows_of(stage, number)):
                loss = _summed_loss(model, tokenizer, chunk) / LOSS_SCALE
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if report is not None and number % 20 == 0:
                report(f"step {number}, up to {stage.max_k} operations, loss {total:.3f}")
            number += 1


def _summed_loss(model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]]) -> Any:
    """Return the cross entropy summed over response tokens. Rows are padded on the right, where causal attention
    makes a mask needless."""
    import torch

    prompts = [tokenizer.encode(prompt) for prompt, _ in rows]
    encoded = [p + tokenizer.encode(r) + [tokenizer.eos_token_id] for p, (_, r) in zip(prompts, rows, strict=True)]
    width = max(map(len, encoded))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), -100)
    for row, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        targets[row, len(prompt) : len(tokens)] = torch.tensor(tokens[len(prompt) :])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def weights_digest(path: Path) -> str:
    """Return the SHA-256 of a weights file, as ``assets/cycle/weights.sha256`` records it."""
    return sha256(path.read_bytes()).hexdigest()


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    """Write a folder that ``from_pretrained`` loads, with the digest of the weights, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    digest = weights_digest(weights)
    (folder / "weights.sha256").write_text(f"{digest}  model.safetensors\n")
    return digest


def main(folder: Path) -> None:
    """Train with the full curriculum and save."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, report=lambda line: sys.stderr.write(f"{line}\n"))
    sys.stdout.write(f"{save(model, tokenizer, folder)}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlctl.tasks.cycle_warmstart OUT_DIR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main(Path(sys.argv[1]))
