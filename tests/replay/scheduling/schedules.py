"""Runs' schedules told again in tests, whole and tampered with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from rlctl.config import Layer
from rlctl.experience.event_base import Event
from rlctl.ops.resolve import resolve
from rlctl.replay.findings import Finding
from rlctl.replay.scheduling.replaying import replay_schedule
from rlctl.schema import Config
from tests.trainers.sessions import SMALL


def config_of(*overrides: str, steps: int) -> Config:
    """Return the configuration of a ``Run``."""
    return resolve(env={}, layers=[Layer("small", SMALL)], overrides=[f"run.steps={steps}", *overrides]).config


def told(events: Iterable[Event], config: Config) -> list[Finding]:
    """Return the findings of a schedule."""
    return list(replay_schedule(list(events), config))


def statuses(findings: Iterable[Finding]) -> list[str]:
    """Return their statuses."""
    return [finding.status for finding in findings]


def numbered_anew(events: Iterable[Event]) -> list[Event]:
    """Return copies with numbers that leave nothing out, as somebody would write them who hides what he did."""
    copies = [copy.copy(event) for event in events]
    for seq, event in enumerate(copies):
        event.seq = seq
    return copies


def without(events: list[Event], place: int) -> list[Event]:
    """Return the events but one."""
    return events[:place] + events[place + 1 :]


def swapped(events: list[Event], place: int, other: int) -> list[Event]:
    """Return the events with two of them in each other's place."""
    changed = list(events)
    changed[place], changed[other] = changed[other], changed[place]
    return changed


def changed(events: list[Event], place: int, **fields: Any) -> list[Event]:
    """Return the events with one of them saying something else."""
    copies = list(events)
    copies[place] = copy.copy(events[place])
    for name, value in fields.items():
        setattr(copies[place], name, value)
    return copies


def places(events: list[Event], kind: type, where: Callable[[Any], bool] = lambda _: True) -> list[int]:
    """Return where events of a kind are."""
    return [place for place, event in enumerate(events) if isinstance(event, kind) and where(event)]


def require_named(findings: list[Finding], seq: int | None = None) -> Finding:
    """Return the finding that differs, which names an event; what comes after it is not said to be exact."""
    differs = [finding for finding in findings if finding.status == "differs"]
    assert len(differs) == 1, findings
    found = differs[0]
    assert found.first_difference is not None and found.first_difference.tensor.startswith("event ")
    assert found.reason.startswith(found.first_difference.tensor)
    after = [finding for finding in findings if finding.step > found.step]
    assert all(finding.status == "unavailable" for finding in after)
    if seq is not None:
        assert found.first_difference.tensor == f"event {seq}", found.reason
    return found
