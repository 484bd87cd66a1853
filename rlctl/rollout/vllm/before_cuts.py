"""Log-probs before a top-p or top-k cut, in vLLM's worker.

vLLM gives either those of the raw logits, to which the temperature has not been applied, or those after the cuts. What
training needs lies between: the temperature-scaled distribution, whole.
"""

from __future__ import annotations

from typing import Any

import torch

#: The engine's ``logprobs_mode``: with it vLLM's sampler returns what its last stage hands back.
MODE = "processed_logprobs"


class BeforeCuts(torch.nn.Module):
    """Takes the place of the stage that cuts and draws (``TopKTopPSampler``).

    Args:
        inner: that stage, which only draws from now on, with whatever kernel is fastest.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, logits: torch.Tensor, generators: dict[int, torch.Generator], k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return tokens [n] and log-probs [n, vocab] of ``logits`` [n, vocab], already divided by the temperature."""
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # first: the cut writes into the logits
        tokens, _ = self.inner(logits, generators, k, p)
        return tokens, logprobs


def log_before_cuts(runner: Any) -> bool:
    """Have a model runner's sampler report log-probs before cuts; False when it is not the sampler that is known."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    sampler: Any = getattr(runner, "sampler", None)
    if type(sampler) is not Sampler or sampler.logprobs_mode != MODE:
        return False
    if isinstance(sampler.topk_topp_sampler, TopKTopPSampler):
        sampler.topk_topp_sampler = BeforeCuts(TopKTopPSampler("raw_logprobs", sampler.use_fp64_gumbel))
    return isinstance(sampler.topk_topp_sampler, BeforeCuts)
