"""What the embedded engine cannot serve, said before anything is queued or computed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from rlctl.errors import UsageError
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Request


def check_request(request: Request, taken: AbstractSet[RequestKey], *, vocab_size: int, max_length: int) -> None:
    """Raise UsageError for a request that cannot be served.

    Args:
        taken: keys in flight.
        vocab_size: number of token ids.
        max_length: most tokens of prompt and response together.
    """
    where = f"request {tuple(request.key)}"
    if request.key in taken:
        raise UsageError("a request with this key is in flight already", where=where)
    if not request.prompt_ids:
        raise UsageError("the prompt is empty", where=where)
    ids = [*request.prompt_ids, *(token for segment in request.prefix for token in segment.token_ids)]
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise UsageError(f"a token id is outside 0 .. {vocab_size - 1}", where=where)
    prompt, new = len(request.prompt_ids), request.params.max_new_tokens
    if prompt + new > max_length:
        raise UsageError(
            f"{prompt} prompt tokens and {new} new ones exceed max_length {max_length}",
            where=where,
            fix="raise max_length or lower max_new_tokens",
        )


def check_length(config: Any, max_length: int) -> None:
    """Raise UsageError when a model has fewer positions than ``max_length``.

    Args:
        config: a transformers configuration. Scaled rotary positions are taken to reach any length.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest is not None and rope.get("rope_type", "default") == "default" and max_length > longest:
        raise UsageError(
            f"prompt and response may take {max_length} tokens together, and the model has {longest} positions",
            where="model.path",
            fix="lower task.max_prompt_tokens or rollout.max_new_tokens",
        )
