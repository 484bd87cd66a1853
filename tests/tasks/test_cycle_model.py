"""The built-in model: what is shipped, where it starts, and that its making can be repeated."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.tasks import cycle, cycle_warmstart
from rlctl.tasks.base import is_held_out
from rlctl.tasks.builtin_models import builtin_model_path
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.cycle_warmstart import STAGES, Stage

FOLDER = builtin_model_path("cycle-tiny")
assert FOLDER is not None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logprobs(model: Any, tokenizer: Any, prompts: list[str], responses: list[str]) -> list[torch.Tensor]:
    """Return, for each pair, the log-probabilities over the vocabulary before each response token, [tokens, vocab]."""
    rows = [tokenizer.encode(p + r) for p, r in zip(prompts, responses, strict=True)]
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.log_softmax(-1)
    starts = [len(tokenizer.encode(p)) - 1 for p in prompts]
    return [logits[i, start : len(row)] for i, (start, row) in enumerate(zip(starts, rows, strict=True))]


def test_names_of_models() -> None:
    assert builtin_model_path("cycle-tiny") == FOLDER
    assert builtin_model_path("org/other") is None
    assert builtin_model_path("") is None


def test_the_name_needs_no_torch() -> None:
    code = "import sys; from rlctl.tasks.builtin_models import builtin_model_path; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_shipped_weights_are_those_that_were_recorded() -> None:
    assert FOLDER is not None
    recorded = (FOLDER / "weights.sha256").read_text().split()[0]
    assert cycle_warmstart.weights_digest(FOLDER / "model.safetensors") == recorded


def test_the_model_is_as_documented(model: Any, tokenizer: Any) -> None:
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (128, 2, 384)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer) == 260
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert sum(p.numel() for p in model.parameters()) == 427_136
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_shipped_tokenizer_is_the_one_that_the_code_builds(tokenizer: Any) -> None:
    built = build_tokenizer()
    assert tokenizer.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()
    assert tokenizer.chat_template == built.chat_template


def test_it_starts_by_guessing_and_rarely_thinks(model: Any, tokenizer: Any) -> None:
    prompts = [s.prompt for _, s in PromptCursor(cycle.CycleTask(), 11).take(400)]
    first = logprobs(model, tokenizer, prompts, [""] * len(prompts))
    probability = torch.stack([row[0] for row in first]).exp().mean(0)
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert 0.06 < probability[think] < 0.12
    assert probability[:10].min() > 0.06
    assert probability[[*range(10), think]].sum() > 0.97


def test_its_reward_when_sampled_is_low(model: Any, tokenizer: Any) -> None:
    # Exact: the probability of the right digit at once plus that of the right trace.
    samples = [s for _, s in PromptCursor(cycle.CycleTask(), 12).take(300)]
    expected = 0.0
    for responses in ([s.answer for s in samples], [cycle.trace(s.prompt) for s in samples]):
        for response, row in zip(
            responses, logprobs(model, tokenizer, [s.prompt for s in samples], responses), strict=True
        ):
            ids = torch.tensor([*tokenizer.encode(response), tokenizer.eos_token_id])
            expected += float(row.gather(1, ids[:, None]).sum().exp())
    assert 0.12 < expected / len(samples) < 0.3


def test_its_traces_are_right_when_it_thinks(model: Any, tokenizer: Any) -> None:
    # Greedy decoding writes the right trace if and only if the right token is the likeliest at each position of it.
    samples = [s for s in cycle.CycleTask().held_out(500) if cycle.operations_of(s.prompt) <= 16]
    traces = [cycle.trace(s.prompt).removeprefix("<think>") for s in samples]
    rows = logprobs(model, tokenizer, [s.prompt + "<think>" for s in samples], traces)
    right = 0
    for trace, row in zip(traces, rows, strict=True):
        right += row.argmax(-1).tolist() == [*tokenizer.encode(trace), tokenizer.eos_token_id]
    assert len(samples) == 300
    assert right / len(samples) >= 0.99


def test_the_warm_start_trains_on_no_held_out_prompt_and_hides_the_skill_in_the_last_stage() -> None:
    for number, stage in enumerate(STAGES):
        rows = cycle_warmstart.rows_of(stage, number)
        assert not any(is_held_out(prompt.removesuffix("<think>"), cycle.HELD_OUT) for prompt, _ in rows)
        assert all(cycle.operations_of(prompt) <= stage.max_k for prompt, _ in rows)
    answered = [response for prompt, response in rows if not prompt.endswith("<think>")]
    thinking = sum(response.startswith("<think>") for response in answered) / len(answered)
    assert abs(thinking - STAGES[-1].think) < 0.02
    assert len(answered) < len(rows)
    chunks = list(cycle_warmstart.chunks_of(rows))
    assert sorted(row for chunk in chunks for row in chunk) == sorted(rows)
    assert len(chunks) <= cycle_warmstart.CHUNKS


def test_a_short_warm_start_is_bitwise_repeatable_and_learns(one_thread: None, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    stages = (Stage(4, 3), Stage(26, 2, think=0.5, rehearse=0.3))
    digests, untrained = [], cycle_warmstart.make_model(tokenizer)
    for name in ("first", "second"):
        made = cycle_warmstart.make_model(tokenizer)
        cycle_warmstart.train(made, tokenizer, stages)
        digests.append(cycle_warmstart.save(made, tokenizer, tmp_path / name))
    assert digests[0] == digests[1]
    assert digests[0] != cycle_warmstart.save(untrained, tokenizer, tmp_path / "untrained")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert torch.equal(loaded.model.embed_tokens.weight, made.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_warm_start_writes_the_shipped_weights(tmp_path: Path) -> None:
    assert FOLDER is not None
    done = subprocess.run(
        [sys.executable, "-m", "rlctl.tasks.cycle_warmstart", str(tmp_path)],
        capture_output=True, text=True, timeout=1700, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == (FOLDER / "weights.sha256").read_text().split()[0]
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
