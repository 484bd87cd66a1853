"""The responses of a step with all that is known of them: from its record, or from its events alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlctl.experience.records.reading import Bundle, Round
from rlctl.experience.rows import Floats, Row
from rlctl.ops.replay.steps import Told, TrainedStep
from rlctl.ops.replay.texts import Decode


@dataclass(frozen=True)
class SamplePiece:
    """Tokens of a response made in one go, by one version on one replica, or told by the task."""

    tokens: int
    version: int
    replica: str
    turn: int
    observation: bool


@dataclass(frozen=True)
class Sample:
    """A response that was trained.

    Attributes:
        step, ordinal, sample: which.
        task: name of its task among several.
        reward: that it was trained on.
        reason: why it ended; empty where no event tells.
        pieces: its tokens, in order.
        staleness: of each token, in versions behind the step that trained it.
        prompt, response: as text; None without a record, or without the tokenizer.
        prompt_ids, response_ids: None without a record.
        rollout_logprobs: as the rollout engine reported them; None for what nobody drew.
        trainer_logprobs: of the same tokens, as the trainer computed them before the update.
        advantage: mean over its trained tokens, None without a record.
        gaps: trainer's log-prob minus rollout's, of each token; empty where one of them is not there.
        cut: whether it was cut at its longest length.
    """

    step: int
    ordinal: int
    sample: int
    task: str
    reward: float | None
    reason: str
    pieces: Sequence[SamplePiece]
    staleness: Sequence[int]
    prompt: str | None = None
    response: str | None = None
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    tokens_text: Sequence[str] = ()
    rollout_logprobs: Sequence[float | None] = ()
    trainer_logprobs: Sequence[float | None] = ()
    advantage: float | None = None
    gaps: Sequence[float | None] = field(default=())
    cut: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the response, observations included."""
        return len(self.staleness)

    @property
    def versions(self) -> list[int]:
        """Weight versions that made it, each once."""
        return sorted({piece.version for piece in self.pieces if not piece.observation})

    @property
    def gap_mean(self) -> float | None:
        """Mean size of the log-prob gap."""
        known = [abs(gap) for gap in self.gaps if gap is not None]
        return sum(known) / len(known) if known else None

    @property
    def gap_max(self) -> float | None:
        """Largest size of the log-prob gap."""
        return max((abs(gap) for gap in self.gaps if gap is not None), default=None)


def samples_of(step: TrainedStep, bundle: Bundle | None, decode: Decode | None) -> list[Sample]:
    """Return a step's samples, by prompt and sample."""
    told = {(t.ordinal, t.sample): t for t in step.samples}
    if bundle is None:
        return [_told_only(step.step, told[key]) for key in sorted(told)]
    return [sample for one in bundle.rounds for sample in recorded_samples(step.step, one, told, decode)]


def _told_only(step: int, told: Told) -> Sample:
    pieces = [SamplePiece(p.tokens, p.version, p.replica, p.turn, p.observation) for p in told.pieces]
    return Sample(
        step, told.ordinal, told.sample, told.task, told.reward, told.failed or told.reason, pieces,
        _staleness(step, pieces),
    )  # fmt: skip


def recorded_samples(
    step: int, one: Round, told: dict[tuple[int, int], Told], decode: Decode | None
) -> Iterator[Sample]:
    tasks = {group.ordinal: group.task for group in one.groups}
    for row, segments, cut in zip(one.rows, one.segments, one.cut, strict=True):
        pieces = [SamplePiece(s.end - s.begin, s.version, s.replica, s.turn, s.observation) for s in segments]
        event = told.get((row.key.ordinal, row.key.sample))
        trainer = row.train_logprobs if row.train_logprobs is not None else row.old_logprobs
        trained = row.advantages[row.mask] if row.advantages.size else row.advantages
        yield Sample(
            step,
            row.key.ordinal,
            row.key.sample,
            tasks.get(row.group, ""),
            row.reward,
            (event.failed or event.reason) if event is not None else "",
            pieces,
            _staleness(step, pieces),
            decode(row.prompt_ids) if decode is not None else None,
            decode(row.response_ids) if decode is not None else None,
            row.prompt_ids,
            row.response_ids,
            [decode([token]) for token in row.response_ids] if decode is not None else (),
            _plain(row, row.rollout_logprobs),
            _plain(row, trainer) if trainer is not None else (),
            float(trained.mean()) if trained.size else None,
            _plain(row, trainer - row.rollout_logprobs) if trainer is not None else (),
            cut,
        )


def _plain(row: Row, values: Floats) -> list[float | None]:
    """Return numbers of the tokens that the model made; None for the others, and for what is no number."""
    known = row.sampled & np.isfinite(values)
    return [float(value) if there else None for value, there in zip(values, known, strict=True)]


def _staleness(step: int, pieces: Sequence[SamplePiece]) -> list[int]:
    return [step - 1 - piece.version for piece in pieces for _ in range(piece.tokens)]
