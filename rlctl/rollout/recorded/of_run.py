"""Responses that another run was trained on, out of its records."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import UsageError
from rlctl.experience.records.reading import Round, read_bundle, read_run
from rlctl.experience.segments import Segment
from rlctl.rollout.recorded.trajectories import WHERE, Group, Limits, Trajectory, faults_of, require_usable


def read_recorded(folder: Path, limits: Limits) -> list[Group]:
    """Return the groups of every recorded step, in the order in which they were trained.

    Raises:
        RecordError: a record is not what was written.
        UsageError: the run has no records, or one of a step in between is gone.
        FindingsError: responses that this run cannot take.
    """
    steps = read_run(folder).steps
    if not steps:
        raise UsageError(f"{folder} has no recorded steps", where=WHERE, fix="record a run with run.record=batches")
    groups: list[Group] = []
    for step in steps:
        for one in read_bundle(folder, step).rounds:
            groups += _groups(one, f"{folder}, step {step}")
    require_usable(groups, list(faults_of(groups, limits)), str(folder))
    return groups


def _groups(one: Round, place: str) -> list[Group]:
    told = {group.ordinal: group for group in one.groups}
    groups: dict[int, Group] = {}
    for row, reward, cut, spans in zip(one.rows, one.task_rewards, one.cut, one.segments, strict=True):
        name = f"{place}, prompt {row.group}"
        if (info := told.get(row.group)) is None:
            raise UsageError(f"{name}: the record does not say which prompt it is", where=WHERE)
        group = groups.setdefault(row.group, Group(row.prompt_ids, label=info.label, task=info.task, place=name))
        segments = [
            Segment(
                row.response_ids[span.begin : span.end],
                [] if span.observation else row.rollout_logprobs[span.begin : span.end].tolist(),
                span.version,
                span.replica,
                span.turn,
                span.observation,
            )
            for span in spans
        ]
        group.trajectories.append(
            Trajectory(
                segments, reward, "length" if cut else "stop", row.observations, f"{name}, sample {row.key.sample}"
            )
        )
    return [groups[ordinal] for ordinal in sorted(groups)]
