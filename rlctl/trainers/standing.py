"""Where a run stands before its trainer begins: all that its decisions depend on from there on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.keytable import get_value
from rlctl.experience.schedule_events import ScheduleBegan
from rlctl.experience.standing import standing_of
from rlctl.schema import Config
from rlctl.trainers.parts import Parts

DECIDES = (
    "algorithm.filter_groups",
    "algorithm.filter_max_batches",
    "algorithm.overlong_responses",
    "placement.layout",
    "placement.replicas",
    "rollout.max_slots",
    "rollout.samples_per_prompt",
    "run.deterministic",
    "run.validate_every",
    "sync.commit",
    "trainer.admission",
    "trainer.interruption",
    "trainer.max_staleness",
    "trainer.mode",
    "trainer.parameter_sync_step",
    "trainer.partial_rollout",
    "trainer.prompts_per_step",
    "trainer.warmup_batches",
)
"""Keys that a run's schedule depends on."""


def settings_of(config: Config) -> dict[str, Any]:
    """Return what the schedule depends on, by key."""
    return {key: get_value(config, key) for key in DECIDES}


def tell_standing(parts: Parts, step: int, measured: Mapping[str, float]) -> None:
    """Tell where a run stands after ``step`` steps. ``measured``: what is known for the switching rule."""
    buffer, remaining = parts.buffer, parts.cursor.remaining
    with buffer.changed:
        parts.events.emit(
            ScheduleBegan(
                step=step,
                steps=parts.total_steps,
                ordinal=parts.cursor.ordinal,
                remaining=-1 if remaining is None else remaining,
                selected=buffer.selected,
                groups=standing_of(buffer),
                held_out=len(parts.held_out),
                hybrids=parts.rollouts.hybrids,
                measured=dict(measured),
                settings=settings_of(parts.config),
            )
        )
