"""Starting the recorder that ``run.record`` asks for."""

from __future__ import annotations

from typing import Any

from rlctl.experience.event_log import EventLog
from rlctl.experience.records.bands import Bands, parse_bands
from rlctl.experience.records.manifest import RECORDS
from rlctl.experience.records.window import Window
from rlctl.ops.session import Session
from rlctl.runtime.fingerprint import fingerprint
from rlctl.runtime.run_directory import RunDirectory
from rlctl.schema import Config
from rlctl.trainers.recording import Circumstances, Recorder


def start_recorder(session: Session, directory: RunDirectory, events: EventLog) -> Recorder:
    """Return the recorder of a run whose folder has its ``config.json`` and whose trainer stands where it goes on from.

    Raises:
        UsageError: a band of ``run.record_keep`` is none.
        RlctlError: the records cannot be written.
    """
    parts, config = session.parts, session.parts.config
    bands = Bands(parse_bands(config.run.record_keep))
    for line in directory.read_metrics():
        bands.add(line)
    recorder = Recorder(
        directory.path / RECORDS,
        Circumstances(
            mode=str(config.trainer.mode),
            attempt=directory.attempt,
            total_steps=parts.total_steps,
            config=(directory.path / "config.json").read_bytes(),
            fingerprint=fingerprint(config, threads=session.threads),
            layout=_layout(config),
        ),
        events,
        parts.checkpoints,
        window=Window(config.run.record_window, config.run.checkpoint_every),
        bands=bands,
        most_pins=config.run.record_pins,
        full=config.run.record == "full",
    )
    recorder.begin(session.trainer.step_number)
    return recorder


def _layout(config: Config) -> dict[str, Any]:
    placement = config.placement
    return {
        "placement": placement.layout,
        "trainer_ranks": placement.trainer_ranks,
        "trainer_tp": placement.trainer_tp,
        "replicas": placement.replicas,
        "hybrid_replicas": placement.hybrid_replicas,
        "replica_tp": placement.replica_tp,
        "model_engine": config.model.engine,
        "rollout_engine": config.rollout.engine,
        "sync_backend": config.sync.backend,
    }
