"""What a replica was given and has not ended, told from the replica to those who would send it elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from rlctl.errors import UsageError
from rlctl.experience.segments import RequestKey, Segment
from rlctl.rollout.base import Output, Request


class Made(msgspec.Struct, array_like=True, frozen=True):
    """News of one response: its segments after the first ``done`` tokens."""

    key: RequestKey
    done: int
    segments: list[Segment]


class News:
    """On the replica's side: what has not been told yet."""

    def __init__(self) -> None:
        self._told: dict[RequestKey, int] = {}

    def of(self, progress: Mapping[RequestKey, list[Segment]]) -> list[Made]:
        """Return what is new in ``progress``; told from then on."""
        news = []
        for key, segments in progress.items():
            done, made = self._told.get(key, 0), _tokens(segments)
            if made > done:
                news.append(Made(key, done, _after(segments, done)))
                self._told[key] = made
        return news

    def ended(self, outputs: Iterable[Output]) -> None:
        """Forget responses that have ended: the same request may come again."""
        for output in outputs:
            self._told.pop(output.key, None)


class UnderWay:
    """On the side of those who send requests: each that has not ended, with what is known of its response."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        self._made: dict[RequestKey, list[Segment]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Sequence[Request], *, max_length: int, vocab_size: int = 0) -> None:
        """Take requests. Raises UsageError, and takes none, when one cannot be served.

        Args:
            max_length: most tokens of prompt and response together.
            vocab_size: number of token ids; 0: not known here.
        """
        keys = set(self._requests)
        for request in requests:
            _check(request, keys, max_length, vocab_size)
            keys.add(request.key)
        self._requests.update((request.key, request) for request in requests)

    def made(self, news: Iterable[Made]) -> None:
        """Note what has been made."""
        for piece in news:
            if piece.key in self._requests:
                so_far = self._made.get(piece.key, [])
                assert piece.done in (0, _tokens(so_far)), f"news of {piece.key} from token {piece.done} on"
                self._made[piece.key] = _joined(so_far if piece.done else [], piece.segments)

    def ended(self, outputs: Iterable[Output]) -> None:
        """These have ended."""
        for output in outputs:
            self._requests.pop(output.key, None)
            self._made.pop(output.key, None)

    def requests(self) -> list[Request]:
        """Return what goes on: every request with the prefix last known."""
        return [
            replace(request, prefix=tuple(self._made.get(key, request.prefix)))
            for key, request in self._requests.items()
        ]

    def clear(self) -> None:
        """Forget everything."""
        self._requests.clear()
        self._made.clear()


def _check(request: Request, taken: set[RequestKey], max_length: int, vocab_size: int) -> None:
    where = f"request {tuple(request.key)}"
    if request.key in taken:
        raise UsageError("a request with this key is in flight already", where=where)
    if not request.prompt_ids:
        raise UsageError("the prompt is empty", where=where)
    begun = (token for segment in request.prefix for token in segment.token_ids)
    ids = [*request.prompt_ids, *begun]
    if vocab_size and (min(ids) < 0 or max(ids) >= vocab_size):
        raise UsageError(
            f"a token id is outside 0 .. {vocab_size - 1}",
            where=where,
            fix="the tokenizer has tokens that the model has not: take the two of one folder",
        )
    prompt, new = len(request.prompt_ids), request.params.max_new_tokens
    if prompt + new > max_length:
        raise UsageError(
            f"{prompt} prompt tokens and {new} new ones exceed the replica's {max_length}",
            where=where,
            fix="raise max_length or lower max_new_tokens",
        )


def _tokens(segments: Iterable[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)


def _after(segments: Iterable[Segment], count: int) -> list[Segment]:
    """Return what follows the first ``count`` tokens."""
    rest = []
    for segment in segments:
        if len(segment.token_ids) > count:
            rest.append(replace(segment, token_ids=segment.token_ids[count:], logprobs=segment.logprobs[count:]))
        count = max(0, count - len(segment.token_ids))
    return rest


def _joined(segments: list[Segment], more: Sequence[Segment]) -> list[Segment]:
    """Return both; neighbours of the same version and replica are one segment."""
    joined = list(segments)
    for segment in more:
        last = joined[-1] if joined else None
        if last is not None and replace(last, token_ids=[], logprobs=[]) == replace(segment, token_ids=[], logprobs=[]):
            joined[-1] = replace(
                last, token_ids=last.token_ids + segment.token_ids, logprobs=last.logprobs + segment.logprobs
            )
        else:
            joined.append(segment)
    return joined
