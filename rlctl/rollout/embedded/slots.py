"""The rows that are being decoded: what sampling needs of each, as arrays, and the tokens made so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlctl.experience.segments import FinishReason, Segment
from rlctl.rollout.base import Request
from rlctl.rollout.embedded.noise import stream_key, uniforms


@dataclass
class Pending:
    """A request and what has been made of it before its present stay in a slot.

    Attributes:
        request: as it was submitted.
        segments: finished segments; neighbours differ in version or replica.
    """

    request: Request
    segments: list[Segment]

    @property
    def made(self) -> int:
        """Number of response tokens in ``segments``."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response so far: what the cache must hold for the next token."""
        return (*self.request.prompt_ids, *(token for segment in self.segments for token in segment.token_ids))

    def ended(self) -> FinishReason | None:
        """Return how the response ended when ``segments`` are a whole one, None when it goes on."""
        if not self.segments:
            return None
        params = self.request.params
        if self.segments[-1].token_ids[-1] in params.stop_token_ids:
            return "stop"
        return "length" if self.made >= params.max_new_tokens else None

    def add(self, segment: Segment) -> None:
        """Append ``segment``, merging it into the last one when version and replica are the same."""
        if not segment.token_ids:
            return
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.version, last.replica) == (segment.version, segment.replica):
            segment = Segment(
                last.token_ids + segment.token_ids, last.logprobs + segment.logprobs, last.version, last.replica
            )
            self.segments.pop()
        self.segments.append(segment)


class Slots:
    """Rows 0 .. n-1 in use, each with its request.

    Args:
        capacity: most rows.
        max_length: most tokens of a response.
    """

    def __init__(self, capacity: int, max_length: int) -> None:
        self.pending: list[Pending] = []
        self._keys = np.zeros(capacity, dtype=np.uint64)
        self._first = np.zeros(capacity, dtype=np.int64)
        self._made = np.zeros(capacity, dtype=np.int64)
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._temperature = np.ones(capacity, dtype=np.float32)
        self._top_p = np.ones(capacity, dtype=np.float32)
        self._top_k = np.zeros(capacity, dtype=np.int64)
        self._stops = np.full((capacity, 1), -1, dtype=np.int64)
        self._tokens = np.zeros((capacity, max_length), dtype=np.int64)
        self._logprobs = np.zeros((capacity, max_length), dtype=np.float32)
        self._row_ids = np.arange(capacity)
        self.plain = True

    def __len__(self) -> int:
        return len(self.pending)

    def add(self, pending: Pending) -> None:
        """Put a request into row n."""
        row, request, params = len(self), pending.request, pending.request.params
        self.pending.append(pending)
        self._keys[row] = stream_key(request.seed, request.key)
        self._first[row] = self._made[row] = pending.made
        self._limit[row] = params.max_new_tokens
        self._temperature[row], self._top_p[row], self._top_k[row] = params.temperature, params.top_p, params.top_k
        missing = len(params.stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, : len(params.stop_token_ids)] = params.stop_token_ids
        self._set_plain()

    def last_tokens(self) -> npt.NDArray[np.int64]:
        """Return [n] the token made last in each row."""
        n = len(self)
        return self._tokens[self._row_ids[:n], self._made[:n] - 1]

    def noise(self) -> npt.NDArray[np.float32]:
        """Return [n] the uniform for the next token of each row."""
        n = len(self)
        return uniforms(self._keys[:n], self._made[:n])

    def params(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return [n] temperature, top-p and top-k."""
        n = len(self)
        return self._temperature[:n], self._top_p[:n], self._top_k[:n]

    def record(
        self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Append one token to every row; return [n] whether it is a stop token, and whether the row is at its limit."""
        n = len(self)
        made = self._made[:n]
        self._tokens[self._row_ids[:n], made] = tokens
        self._logprobs[self._row_ids[:n], made] = logprobs
        made += 1
        return (tokens[:, None] == self._stops[:n]).any(axis=1), made >= self._limit[:n]

    def close(self, row: int, version: int, replica: str) -> Pending:
        """Return the request of ``row`` with the tokens of its present stay added as a segment."""
        pending, span = self.pending[row], slice(self._first[row], self._made[row])
        tokens, logprobs = self._tokens[row, span].tolist(), self._logprobs[row, span].tolist()
        pending.add(Segment(tokens, logprobs, version, replica))
        self._first[row] = self._made[row]
        return pending

    def so_far(self, row: int, version: int, replica: str) -> list[Segment]:
        """Return what ``close`` would make of ``row``, which goes on."""
        span = slice(self._first[row], self._made[row])
        held = Pending(self.pending[row].request, list(self.pending[row].segments))
        held.add(Segment(self._tokens[row, span].tolist(), self._logprobs[row, span].tolist(), version, replica))
        return held.segments

    def keep(self, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Drop the rows not marked in ``rows`` [n]; rows from the end move into the gaps.

        Returns:
            order: row i is now what row ``order[i]`` was.
        """
        count = int(rows.sum())
        order = np.arange(count)
        gaps = np.flatnonzero(~rows[:count])
        order[gaps] = count + np.flatnonzero(rows[count:])
        for array in (
            self._keys,
            self._first,
            self._made,
            self._limit,
            self._temperature,
            self._top_p,
            self._top_k,
            self._stops,
        ):
            array[gaps] = array[order[gaps]]
        for gap in gaps:
            # Only what has been written moves: rows are as long as the longest response may be.
            written = self._made[gap]
            self._tokens[gap, :written] = self._tokens[order[gap], :written]
            self._logprobs[gap, :written] = self._logprobs[order[gap], :written]
        self.pending = [self.pending[row] for row in order]
        self._set_plain()
        return order

    def _set_plain(self) -> None:
        temperature, top_p, top_k = self.params()
        self.plain = bool((temperature == 1).all() and (top_p == 1).all() and (top_k == 0).all())
