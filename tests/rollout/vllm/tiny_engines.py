"""Tiny models, vLLM engines that serve them, and transformers as the judge of what they say."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from rlctl.process import run_token
from rlctl.rollout.vllm.names import EXTENSION
from rlctl.rollout.vllm.plugin import register

ROOT = Path(__file__).parents[3]
# One process, no compilation, no spinning threads; vLLM reads these when an engine is made.
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
# Longer than a block of vLLM's on the CPU (128 tokens): it can be found in the prefix cache.
PROMPT = [(7 * i) % 256 for i in range(150)]


@contextmanager
def vllm_environment(folder: Path) -> Iterator[None]:
    """Set the environment of engines, in which vLLM finds rlctl's plugin as in an installed rlctl."""
    before = dict(os.environ)
    os.environ.update(ENGINE_ENV)
    run_token()
    path = [str(ROOT)]
    if not any(e.name == "rlctl" for e in entry_points(group="vllm.general_plugins")):
        info = folder / "rlctl-0.dist-info"
        info.mkdir(parents=True)
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in declared.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlctl\nVersion: 0\n")
        path.append(str(folder))
        sys.path.append(str(folder))
    register()  # a process loads vLLM's plugins once, and another test may have undone what ours did
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [before.get("PYTHONPATH", "")])])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if len(path) > 1:
            sys.path.remove(str(folder))


class TinyModel:
    """A trainer's model: float32, random, another one after ``become``."""

    def __init__(self, *, tied: bool = True, kind: str = "Qwen2", **sizes: int) -> None:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, **sizes,
        )  # fmt: skip
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        self.leave_out: set[str] = set()
        self.add: dict[str, torch.Tensor] = {}
        self.become(0)

    def become(self, seed: int) -> None:
        """Take other weights."""
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=g)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by name."""
        return dict(self.model.named_parameters())

    def per_tensor_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightSource."""
        yield from ((n, p.detach()) for n, p in self.model.named_parameters() if n not in self.leave_out)
        yield from self.add.items()

    def offload(self) -> None:
        raise AssertionError("nothing is colocated here")

    def logprobs(self, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probs [len(tokens)] of ``tokens`` after ``prompt``."""
        logprobs = (self.logits(prompt, tokens) / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Return the logits [len(tokens), vocab] from which each of ``tokens`` after ``prompt`` was drawn."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([prompt + tokens])).logits
        return logits[0, len(prompt) - 1 : -1]


def engine_arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Return what a small engine is made with."""
    return {
        "model": str(folder), "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32",
        "max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, "disable_log_stats": True,
        "seed": 0, "worker_extension_cls": EXTENSION, **more,
    }  # fmt: skip


def say(llm: Any, prompt: list[int] = PROMPT, tokens: int = 8) -> tuple[list[int], torch.Tensor, int]:
    """Return the tokens that follow greedily, their log-probs, and how much of the prompt was in the cache."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, logprobs=0, temperature=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    return (*spoken(output), output.num_cached_tokens)


def spoken(output: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens and log-probs of a request's output."""
    (one,) = output.outputs
    ids = list(one.token_ids)
    return ids, torch.tensor([step[t].logprob for step, t in zip(one.logprobs, ids, strict=True)])


def end_engine(llm: Any) -> None:
    """Free an engine of this process, and the groups that vLLM makes once a process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
