"""A run whose rollouts are recorded ones: finding them, and checking them against the model that they are to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlctl.errors import FindingsError, UsageError
from rlctl.experience.event_log import EventLog
from rlctl.experience.events import Noted
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.base import ModelEngine
from rlctl.model.loading import LoadedModel
from rlctl.rollout.recorded.alignment import misaligned
from rlctl.rollout.recorded.foreign import read_jsonl
from rlctl.rollout.recorded.of_run import read_recorded
from rlctl.rollout.recorded.trajectories import NAME, WHERE, Group, Limits
from rlctl.runtime.cluster.supported import needs_processes
from rlctl.schema import Config

MOST_CHECKED = 1 << 20
"""Tokens of responses that are held against the model before the first step."""

_FAR = 1.0


def recorded_groups(config: Config, loaded: LoadedModel) -> list[Group] | None:
    """Return the responses that ``rollout.engine=recorded:PATH`` names; None for another engine.

    Raises:
        UsageError: there is no such file or run, or the run's layout has no use for it.
        RecordError: the other run's record is not what was written.
        FindingsError: responses that cannot be trained, each with its place.
    """
    name, _, path = config.rollout.engine.partition(":")
    if name != NAME:
        return None
    source = Path(path).expanduser()
    if not path or not source.exists():
        raise UsageError(
            f"there is no {path or 'path'} to take responses from",
            where=WHERE,
            fix="write rollout.engine=recorded:FILE.jsonl, or recorded:RUN for the folder of a recorded run",
        )
    if needs_processes(config):
        raise UsageError(
            "recorded responses need no rollout devices, and this run has some",
            where=WHERE,
            fix="set placement.layout=colocated, placement.replicas=1 and sync.backend=naive",
        )
    if config.reward_model.path is not None:
        raise UsageError(
            "recorded responses come with what they earned, and a reward model has no texts of their prompts",
            where="reward_model.path",
            fix="leave it unset, or score the file before",
        )
    limits = Limits(
        vocab_size=loaded.model.config.vocab_size,
        samples=config.rollout.samples_per_prompt,
        max_prompt_tokens=config.task.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    return read_recorded(source, limits) if source.is_dir() else read_jsonl(source, limits)


def require_aligned(groups: Sequence[Group], model: ModelEngine, config: Config, events: EventLog) -> None:
    """Hold recorded log-probs against those of the model as the run finds it, and tell how far they are.

    Raises:
        FindingsError: log-probs that are shifted against their tokens, with the shift that fits best.
    """
    rows, places, tokens = [], [], 0
    for ordinal, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            ids = trajectory.token_ids
            logprobs = [
                value for s in trajectory.segments for value in (s.logprobs or [float("nan")] * len(s.token_ids))
            ]
            rows.append(
                Row(
                    key=RequestKey(ordinal, index),
                    group=ordinal,
                    prompt_ids=group.prompt_ids,
                    response_ids=ids,
                    reward=trajectory.reward,
                    rollout_logprobs=np.asarray(logprobs, np.float32),
                    versions=np.zeros(len(ids), np.int64),
                )
            )
            places.append(trajectory.place)
            tokens += len(ids)
        if tokens > MOST_CHECKED:
            break
    computed = model.log_probs(rows, temperature=config.rollout.temperature)
    findings, gap = misaligned([row.rollout_logprobs for row in rows], computed, places)
    if findings:
        raise FindingsError(f"the responses of {config.rollout.engine} cannot be trained", findings)
    far = "" if gap is None or gap < _FAR else ": another policy made them, or another sampling temperature"
    told = "too short to compare" if gap is None else f"{gap:.3g} nats a token from this model's{far}"
    events.emit(Noted(message=f"{len(groups)} groups of recorded responses; their log-probs are {told}"))
