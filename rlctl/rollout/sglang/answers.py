"""What an SGLang server says of a response, as segments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.experience.segments import FinishReason, Segment


class Reason(msgspec.Struct):
    """Why a response ended. ``matched``: the token that ended it, when it was one."""

    type: FinishReason
    matched: Any = None
    message: str | None = None


class Span(msgspec.Struct):
    """Tokens ``start`` up to ``end`` of those made by this call, and the version that made them."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """The part of ``meta_info`` that is used; SGLang says more.

    Attributes:
        finish_reason: why it ended.
        weight_version: the server's when it ended.
        weight_versions: of its tokens, when they were made under several.
        output_token_logprobs: (log-prob, token id, text) of each token.
    """

    finish_reason: Reason
    weight_version: str
    weight_versions: list[Span] = []
    output_token_logprobs: list[tuple[float, int, Any]] = []


class Generated(msgspec.Struct):
    """An answer to ``generate``."""

    meta_info: Meta
    output_ids: list[int] = []


def read_generated(answer: object) -> Generated:
    """Check and convert an answer. Raises RlctlError when it is none, or ids and log-probs do not belong together."""
    try:
        found = msgspec.convert(answer, Generated)
    except msgspec.ValidationError as error:
        raise RlctlError(f"SGLang's answer to /generate is not understood: {error}") from error
    named = [token for _, token, _ in found.meta_info.output_token_logprobs]
    # A request that is aborted while it waits may be answered with fewer log-probs than ids: what has none is no token.
    if named != found.output_ids[: len(named)]:
        raise RlctlError("SGLang's answer gives log-probs of other tokens than it has made")
    if found.meta_info.finish_reason.type != "abort" and len(named) != len(found.output_ids):
        raise RlctlError(f"SGLang's answer has {len(found.output_ids)} tokens, and log-probs of {len(named)}")
    return found


def segments_of(found: Generated, replica: str) -> list[Segment]:
    """Return what was made, one segment for each version of the weights."""
    drawn = found.meta_info.output_token_logprobs
    spans = found.meta_info.weight_versions or [Span(found.meta_info.weight_version, 0, len(drawn))]
    if spans[0].start != 0 or any(one.end != two.start for one, two in pairwise(spans)) or spans[-1].end < len(drawn):
        raise RlctlError(f"SGLang's versions do not cover the {len(drawn)} tokens: {spans}")
    made = []
    for span in spans:
        tokens = drawn[span.start : span.end]
        if tokens:
            version = version_of(span.version)
            made.append(Segment([t for _, t, _ in tokens], [p for p, _, _ in tokens], version, replica))
    return made


def version_of(text: str) -> int:
    """Return a version that rlctl has named. Raises RlctlError for another, as that of the weights at the start."""
    if not text.isdecimal():
        raise RlctlError(f"SGLang's weights are of version {text!r}, which no sync has brought")
    return int(text)
