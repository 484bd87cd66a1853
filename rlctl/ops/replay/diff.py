"""Where two runs part: keys of their configurations first, then the first step, and in it the first stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.config.keytable import flatten, plain
from rlctl.ops.replay.history import History
from rlctl.ops.replay.parting import STAGES, KeyDifference, Parting
from rlctl.ops.replay.record_diff import environment_differences, record_differences
from rlctl.ops.replay.steps import Told, TrainedStep

_CLOCKS = ("seconds", "_per_s", "bubble", "memory", "sync_", "gpu_", "cpu_")
"""What a metric's name holds that tells of the machine's pace, not of the training."""
_OF_GENERATION = ("generated_tokens", "aborted_", "resumed_", "prompts", "samples", "staleness", "turns", "evicted")
_OF_REWARD = (
    "reward",
    "task_reward",
    "failed_rewards",
    "response_tokens",
    "truncated",
    "overlong_",
    "groups_",
    "tasks/",
)


@dataclass
class RunDifference:
    """What differs between two runs.

    Attributes:
        config: keys.
        environment: of machines and packages; no difference of the runs by itself.
        parting: the first step that differs; None when all that both have are the same.
        equal_steps: steps that are the same in both, before that.
        resumed: of each run, the steps that later attempts went on from.
        only: steps that one run alone has, by ``this`` and ``other``.
        compared: what could be compared.
    """

    config: list[KeyDifference] = field(default_factory=list)
    environment: list[KeyDifference] = field(default_factory=list)
    parting: Parting | None = None
    equal_steps: list[int] = field(default_factory=list)
    resumed: dict[str, list[int]] = field(default_factory=dict)
    only: dict[str, list[int]] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.config and self.parting is None and not any(self.only.values())

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "equal": self.equal,
            "config": self.config,
            "environment": self.environment,
            "first_difference": self.parting,
            "last_equal_step": self.equal_steps[-1] if self.equal_steps else None,
            "resumed_at": self.resumed,
            "steps_only_in": self.only,
            "compared": self.compared,
        }


def compare_runs(this: History, other: History) -> RunDifference:
    """Compare two runs: their configurations, then the steps that both have, until the first that differs.

    Raises:
        RecordError: a record is not whole; nothing can be said of it.
    """
    found = RunDifference(config=config_differences(this, other))
    mine, theirs = this.steps, other.steps
    both = [step for step in mine if step in theirs]
    found.only = {
        "this": [step for step in mine if step not in theirs],
        "other": [step for step in theirs if step not in mine],
    }
    found.resumed = {
        name: [attempt.from_step for attempt in run.attempts if attempt.from_step]
        for name, run in (("this", this), ("other", other))
    }
    recorded = [step for step in both if step in this.recorded and step in other.recorded]
    found.compared = ["configuration", f"events and metrics of {len(both)} steps", f"records of {len(recorded)}"]
    found.environment = environment_differences(this, other, recorded)
    of_records = record_differences(this, other)
    for step in both:
        differences = [*step_differences(mine[step], theirs[step]), *of_records(step)]
        if differences:
            found.parting = min(differences, key=lambda parting: STAGES.index(parting.stage))
            break
        found.equal_steps.append(step)
    return found


def config_differences(this: History, other: History) -> list[KeyDifference]:
    """Return the keys that differ, in the order of the reference."""
    mine, theirs = flatten(this.resolved.config), flatten(other.resolved.config)
    return [KeyDifference(key, plain(mine[key]), plain(theirs[key])) for key in mine if mine[key] != theirs[key]]


def step_differences(mine: TrainedStep, theirs: TrainedStep) -> Iterator[Parting]:
    """Yield what the events of a step tell differently, stage by stage. Wall time is left out."""
    step = mine.step
    if mine.ordinals != theirs.ordinals:
        yield Parting(step, "generate", "selected prompts", mine.ordinals, theirs.ordinals)
        return
    yield from _samples(step, mine.samples, theirs.samples)
    yield from _metrics(step, mine.metrics, theirs.metrics)


def _samples(step: int, mine: Sequence[Told], theirs: Sequence[Told]) -> Iterator[Parting]:
    seen: set[str] = set()
    for a, b in zip(mine, theirs, strict=False):
        where = f"prompt {a.ordinal}, sample {a.sample}"
        facts: tuple[tuple[str, str, object, object], ...] = (
            ("generate", "tokens", a.tokens, b.tokens),
            ("generate", "finish reason", a.reason, b.reason),
            ("generate", "versions", _versions(a), _versions(b)),
            ("reward", "reward", a.reward, b.reward),
        )
        for stage, name, x, y in facts:
            if x != y and name not in seen:
                seen.add(name)
                yield Parting(step, stage, name, x, y, _gap(x, y), where)
    if len(mine) != len(theirs):
        yield Parting(step, "generate", "responses", len(mine), len(theirs))


def _versions(told: Told) -> list[list[int]]:
    """Return weight version and tokens of each piece that the model made, pieces of one version as one."""
    runs: list[list[int]] = []
    for piece in told.pieces:
        if piece.observation:
            runs.append([-1, piece.tokens])
        elif runs and runs[-1][0] == piece.version:
            runs[-1][1] += piece.tokens
        else:
            runs.append([piece.version, piece.tokens])
    return runs


def _metrics(step: int, mine: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[Parting]:
    for name in sorted(mine.keys() | theirs.keys(), key=lambda name: (name != "lr", name)):  # causes first
        if any(clock in name for clock in _CLOCKS):
            continue
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            yield Parting(step, stage_of(name), name, a, b)
        elif a != b and not (math.isnan(a) and math.isnan(b)):
            yield Parting(step, stage_of(name), name, a, b, _gap(a, b))


def _gap(this: object, other: object) -> float | None:
    if isinstance(this, int | float) and isinstance(other, int | float) and math.isfinite(this - other):
        return abs(this - other)
    return None


def stage_of(metric: str) -> str:
    """Return the stage that a metric comes from."""
    if metric.startswith(_OF_GENERATION):
        return "generate"
    if metric.startswith(_OF_REWARD):
        return "reward"
    if metric.startswith(("value", "critic", "return")):
        return "update_critic"
    return "advantages" if metric.startswith(("advantage", "kl_in_reward")) else "update_actor"
