"""The trackers of a training run, from its configuration and its folder."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.experience.event_log import EventLog
from rlctl.runtime.atomic import write_bytes
from rlctl.schema import Config
from rlctl.trackers.base import RunInfo
from rlctl.trackers.listener import Trackers


def start_trackers(
    targets: Mapping[str, str],
    config: Config,
    folder: Path,
    events: EventLog,
    *,
    document: Mapping[str, Any],
    from_step: int,
) -> Trackers:
    """Start the trackers of one attempt; one that does not start is told of and left out.

    Args:
        targets: name -> ``module:Class``, as ``require_trackers`` gives it.
        config: resolved.
        folder: of the run; trackers keep their files under ``trackers/`` in it.
        events: what they follow.
        document: the resolved configuration as ``rlctl.config.to_json`` gives it.
        from_step: the step that this attempt goes on from.
    """
    own = folder / "trackers"
    info = RunInfo(
        project=config.run.tracker_project,
        name=folder.resolve().name,
        id=_run_id(own) if targets else "",
        folder=str(own.resolve()),
        config=dict(document["config"]),
        from_step=from_step,
    )
    output = folder / "logs" / "trackers.log"
    return Trackers(targets, info, events, patience=config.run.tracker_timeout, output=output)


def _run_id(folder: Path) -> str:
    """Return the id that all attempts in this run folder share."""
    file = folder / "id"
    if not file.exists():
        folder.mkdir(exist_ok=True)
        write_bytes(file, secrets.token_hex(4).encode())
    return file.read_text()
