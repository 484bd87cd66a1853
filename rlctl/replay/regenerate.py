"""Level R3: every segment made again with the weights of its version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from rlctl.experience.records.columns import SegmentSpan
from rlctl.experience.records.reading import Round
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey, Segment
from rlctl.model.passes import DTYPES
from rlctl.replay.findings import Difference, Finding, next_lower
from rlctl.replay.step_record import Source
from rlctl.replay.walk import Walk
from rlctl.rollout.base import Request, SamplingParams
from rlctl.rollout.recorded.trajectories import NAME
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.runtime.cluster.making import max_length, replica_threads
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.runtime.models_beside import device_of
from rlctl.runtime.threads import thread_count


@dataclass(frozen=True)
class Piece:
    """A segment to make again: of which row of which round, and where its turn begins."""

    round: int
    row: int
    turn: int
    turn_begin: int
    segment: SegmentSpan


@dataclass
class Outcome:
    """What came of a step's segments so far.

    Attributes:
        segments, tokens: made again.
        first: the first piece that differs, with how.
        gaps: absolute differences of log-probs.
    """

    segments: int = 0
    tokens: int = 0
    first: tuple[Piece, str, Difference] | None = None
    gaps: list[np.ndarray] = field(default_factory=list)


class Regeneration:
    """Makes segments again on an engine of this process; of an engine that is none, it compares the log-probs with the
    trainer's.

    Args:
        walk: whose weights they are made with.
        source: the record.
        stack: closing it frees the engine.
    """

    def __init__(self, walk: Walk, source: Source, stack: ExitStack) -> None:
        self._walk, self._source = walk, source
        config = self._config = walk.rebuilt.config
        self._name = config.rollout.engine.partition(":")[0]
        self.makes = self._name in ROLLOUT_ENGINES.names() and self._name != NAME
        self.outcomes: dict[int, Outcome] = {}
        if self.makes:
            self._engine = ROLLOUT_ENGINES.load(config.rollout.engine)(
                walk.rebuilt.model_config,
                dtype=DTYPES[config.model.dtype],
                max_slots=config.rollout.max_slots,
                max_length=max_length(config),
                device=device_of(config),
                trust_remote_code=config.model.trust_remote_code,
            )
            stack.callback(self._engine.close)

    def at(self, version: int, step: int) -> None:
        """Make the segments of ``step`` that ``version`` made, with the weights as they are now."""
        record = self._source.step(step)
        self._config, rounds = record.config, record.rounds
        wanted = [piece for piece in pieces_of(rounds) if piece.segment.version == version]
        outcome = self.outcomes.setdefault(step, Outcome())
        outcome.segments += len(wanted)
        outcome.tokens += sum(piece.segment.end - piece.segment.begin for piece in wanted)
        if self.makes:
            self._make(version, rounds, wanted, outcome)
        else:
            self._score(rounds, wanted, outcome)

    def finding(self, step: int) -> Finding:
        """Return what came of a step, all of whose segments were made."""
        outcome = self.outcomes.pop(step, Outcome())
        if not self.makes:
            return self._gap(step, outcome)
        if outcome.first is None:
            return Finding(step=step, level="R3", status="exact")
        _, reason, difference = outcome.first
        if excuse := self._excuse():
            reason = f"{reason}; {excuse}{next_lower('R3')}"
            return Finding(step=step, level="R3", status="unavailable", reason=reason, first_difference=difference)
        return Finding(step=step, level="R3", status="differs", reason=reason, first_difference=difference)

    def _excuse(self) -> str:
        """Return why this process may give other last bits than the run's replicas, "" where it may not."""
        tp = self._config.placement.replica_tp
        if tp > 1:
            return f"a replica's sums went over {tp} tensor-parallel ranks, and here one process has the whole model"
        if not self._config.run.deterministic:
            return "without run.deterministic a token may depend on what was decoded beside it"
        return ""

    def _gap(self, step: int, outcome: Outcome) -> Finding:
        gaps = np.concatenate(outcome.gaps) if outcome.gaps else np.zeros(1, np.float32)
        reason = (
            f"{self._name} decodes what runs at the same time together, and its kernels' last bits depend on that, so "
            f"its tokens are not made again; of the {outcome.tokens} tokens the log-probs are within "
            f"{float(gaps.max()):.3g} of the trainer's under the same weights, {float(gaps.mean()):.3g} on average"
        )
        difference = Difference("generate", "rollout_logprobs", float(gaps.max()))
        return Finding(
            step=step,
            level="R3",
            status="unavailable",
            reason=reason + next_lower("R3"),
            first_difference=difference,
        )

    def _make(self, version: int, rounds: Sequence[Round], wanted: Sequence[Piece], outcome: Outcome) -> None:
        config = self._config
        if needs_processes(config):
            torch.set_num_threads(replica_threads(config))
        try:
            self._engine.load_weights(self._walk.rebuilt.model.per_tensor_params(), version)
            for batch in _apart(wanted, rounds):
                requests = [self._request(rounds[piece.round].rows[piece.row], piece, rounds) for piece in batch]
                for piece, request, output in zip(batch, requests, self._engine.generate(requests), strict=True):
                    made = sum(len(segment.token_ids) for segment in request.prefix)
                    row = rounds[piece.round].rows[piece.row]
                    self._compare(row, piece, output.token_ids[made:], output.logprobs[made:], outcome)
        finally:
            torch.set_num_threads(thread_count(config.run.threads))

    def _request(self, row: Row, piece: Piece, rounds: Sequence[Round]) -> Request:
        """Return the request that goes on with a turn where the segment begins, and ends where it ends."""
        segment, begin = piece.segment, piece.turn_begin
        prefix = tuple(
            _segment(row, before)
            for before in rounds[piece.round].segments[piece.row]
            if begin <= before.begin < segment.begin
        )
        rollout = self._config.rollout
        params = SamplingParams(
            max_new_tokens=segment.end - begin,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self._walk.rebuilt.stop_ids,
        )
        prompt = (*row.prompt_ids, *row.response_ids[:begin])
        return Request(_key(row, piece), prompt, params, self._config.run.seed, prefix)

    def _compare(self, row: Row, piece: Piece, ids: Sequence[int], logprobs: Sequence[float], outcome: Outcome) -> None:
        segment = piece.segment
        told = row.response_ids[segment.begin : segment.end]
        where = f"prompt {row.key.ordinal}, sample {row.key.sample}, version {segment.version}"
        difference: Difference | None = None
        if list(ids) != list(told):
            place = next(
                (i for i, (a, b) in enumerate(zip(ids, told, strict=False)) if a != b), min(len(ids), len(told))
            )
            where += f", token {segment.begin + place}"
            difference = Difference("generate", "response_ids")
        else:
            gaps = np.abs(np.asarray(logprobs, np.float32) - row.rollout_logprobs[segment.begin : segment.end])
            if gaps.any():
                where += f", token {segment.begin + int(np.flatnonzero(gaps)[0])}: the tokens are the same"
                difference = Difference("generate", "rollout_logprobs", float(gaps.max()))
        if difference is not None and (outcome.first is None or _order(piece) < _order(outcome.first[0])):
            outcome.first = (piece, where, difference)

    def _score(self, rounds: Sequence[Round], wanted: Sequence[Piece], outcome: Outcome) -> None:
        for number, told in enumerate(rounds):
            mine = [piece for piece in wanted if piece.round == number]
            rows = [told.rows[index] for index in sorted({piece.row for piece in mine})]
            if not rows:
                continue
            found = self._walk.rebuilt.model.log_probs(rows, temperature=self._config.rollout.temperature)
            trained = {row.key: values for row, values in zip(rows, found, strict=True)}
            for piece in mine:
                row, span = told.rows[piece.row], slice(piece.segment.begin, piece.segment.end)
                outcome.gaps.append(np.abs(trained[row.key][span] - row.rollout_logprobs[span]))


def versions_of(rounds: Sequence[Round]) -> list[int]:
    """Return the versions that made a step's tokens, in order."""
    return sorted({piece.segment.version for piece in pieces_of(rounds)})


def pieces_of(rounds: Sequence[Round]) -> Iterator[Piece]:
    """Yield the segments of a step's responses."""
    for number, told in enumerate(rounds):
        for index, (row, segments) in enumerate(zip(told.rows, told.segments, strict=True)):
            for segment in segments:
                if segment.observation:
                    continue
                turn = next(i for i, (begin, end) in enumerate(row.turns) if begin <= segment.begin < end)
                yield Piece(number, index, turn, row.turns[turn][0], segment)


def _apart(wanted: Sequence[Piece], rounds: Sequence[Round]) -> Iterator[list[Piece]]:
    """Yield pieces in batches, none of which has two of one turn: their requests have the same key."""
    left = list(wanted)
    while left:
        taken: dict[RequestKey, Piece] = {}
        for piece in left:
            taken.setdefault(_key(rounds[piece.round].rows[piece.row], piece), piece)
        yield list(taken.values())
        chosen = set(taken.values())
        left = [piece for piece in left if piece not in chosen]


def _key(row: Row, piece: Piece) -> RequestKey:
    return RequestKey(row.key.ordinal, row.key.sample, piece.turn)


def _order(piece: Piece) -> tuple[int, int, int]:
    return piece.round, piece.row, piece.segment.begin


def _segment(row: Row, told: SegmentSpan) -> Segment:
    span = slice(told.begin, told.end)
    logprobs = [float(value) for value in row.rollout_logprobs[span]]
    return Segment(list(row.response_ids[span]), logprobs, told.version, told.replica)
