"""rlctl's requests in vLLM's words, and vLLM's outputs in rlctl's."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.segments import FinishReason, Segment
from rlctl.rollout.base import Output, Request
from rlctl.rollout.embedded.slots import Pending

# Below it vLLM raises a temperature that is not 0, without a word.
LOWEST_TEMPERATURE = 0.01


def check_sampling(request: Request, *, cuts: bool) -> None:
    """Raise UsageError for what vLLM would sample otherwise than asked, or report wrongly.

    Args:
        cuts: the engine's log-probs are those before a top-p or top-k cut.
    """
    params, where = request.params, f"request {tuple(request.key)}"
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise UsageError(
            f"vLLM samples at temperature {LOWEST_TEMPERATURE} where {params.temperature} is asked for",
            where=where,
            fix=f"give 0 (greedy), or {LOWEST_TEMPERATURE} and more",
        )
    if not cuts and (params.top_p < 1 or params.top_k > 0) and params.temperature > 0:
        raise UsageError(
            f"this vLLM gives log-probs after the cut of top_p={params.top_p:g}, top_k={params.top_k}, and training "
            "needs those before it",
            where=where,
            fix="set rollout.top_p=1 and rollout.top_k=0, or serve with rollout.engine=transformers",
        )


def stream_seed(request: Request, position: int) -> int:
    """Return the seed of the tokens from ``position`` of the response on: 63 bits of a hash of who asks for what.

    The samples of a group differ, and which replica samples makes no difference. vLLM draws on from it token by token,
    so a response that was interrupted goes on with other noise than one that was not.
    """
    key = request.key
    text = f"rlctl noise {request.seed} {key.ordinal} {key.sample} {key.turn} {position}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def sampling(pending: Pending) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for the rest of a response."""
    params = pending.request.params
    return {
        "max_tokens": params.max_new_tokens - pending.made,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": stream_seed(pending.request, pending.made),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # what ends a response is said by the request, not by the model's folder
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


def output_of(pending: Pending, completion: Any, replica: str) -> Output:
    """Return a response, its prefix included, as vLLM's ``CompletionOutput`` ends it.

    Raises:
        RlctlError: it lacks a log-prob, or the version that a token was made under.
    """
    whole = Pending(pending.request, list(pending.segments))
    for segment in segments_of(completion, replica):
        whole.add(segment)
    return Output(pending.request.key, whole.segments, _reason(completion.finish_reason))


def segments_of(completion: Any, replica: str) -> list[Segment]:
    """Return one segment for each weight version that vLLM's tokens were made under. Raises RlctlError."""
    ids = list(completion.token_ids)
    logprobs = list(completion.logprobs.logprobs) if completion.logprobs is not None else []
    spans = completion.weight_versions or []
    if len(logprobs) != len(ids) or sum(span.end - span.start for span in spans) != len(ids):
        raise RlctlError(f"vLLM returned {len(ids)} tokens with {len(logprobs)} log-probs, versions {spans}")
    return [
        Segment(ids[span.start : span.end], logprobs[span.start : span.end], int(span.version), replica)
        for span in spans
    ]


def _reason(reason: str) -> FinishReason:
    known: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if reason not in known:
        raise RlctlError(f"vLLM ended a response with {reason!r}")
    return known[reason]
