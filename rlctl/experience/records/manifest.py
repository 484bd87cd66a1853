"""What the manifest of a recorded step says, and how a run folder is laid out around it.

``records/step_00000012/`` holds ``manifest.json``, ``batch.safetensors`` and ``SHA256SUMS``, which names the digests of
the two as ``sha256sum -c`` takes them; ``records/configs/SHA256.json`` the configurations that manifests name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from rlctl.errors import RlctlError
from rlctl.experience.figures import Figure

SCHEMA = 2
SCHEMAS = (1, SCHEMA)
"""Those that are read; a manifest of schema 1 knows no steps that failed."""
RECORDS = "records"
MANIFEST = "manifest.json"
BATCH = "batch.safetensors"
SUMS = "SHA256SUMS"
CONFIGS = "configs"
PINS = "pinned.json"
END = "end.json"
FINAL = "final"

_NAME = re.compile(r"^step_(\d{8,})$")


class EventRange(msgspec.Struct, frozen=True):
    """Lines of the event log, ``first_seq`` to ``last_seq``, both included, and the SHA-256 of their bytes."""

    first_seq: int
    last_seq: int
    sha256: str


class CheckpointRef(msgspec.Struct, frozen=True):
    """A checkpoint: its name and the SHA-256 of its tensors, as its own ``state.json`` states it."""

    name: str
    tensors_sha256: str


class GroupInfo(msgspec.Struct, frozen=True):
    """A prompt group of a round; ``row``: index of the prompt in its task's data."""

    ordinal: int
    row: int
    label: str
    task: str
    dispatched: int


class RoundInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A local update, beside its rows.

    Attributes:
        groups: that were selected for it, in order.
        mini_batches: row indexes of each optimizer step, in order.
        micro_batches: of each optimizer step, each rank's passes, as indexes of the round's rows.
        metrics: of its stages.
        kl_coef, kl_coef_after: weight of the KL before and after it.
        skipped_updates: optimizer steps left out because a gradient was not finite.
    """

    groups: list[GroupInfo]
    mini_batches: list[list[int]]
    micro_batches: list[list[list[list[int]]]]
    metrics: dict[str, Figure]
    kl_coef: float
    kl_coef_after: float
    skipped_updates: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """A step ended with an error: in ``stage`` of local update ``round`` (from 0), which said ``message``. Where the
    stages had all run it is the hook ``on_step_end``, in which the weights are synced."""

    stage: str
    round: int
    message: str


def words_of(error: Exception) -> str:
    """Return what an error says in a ``Failure``."""
    return error.message if isinstance(error, RlctlError) else str(error) or type(error).__name__


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's record says beside its rows.

    Attributes:
        step: its number; the weights carry ``version`` after it.
        attempt: which start of the run trained it.
        config_sha256: of ``config.json`` as that attempt wrote it; kept under ``records/configs``.
        fingerprint: packages, machine, threads and variables that it was computed with.
        layout: trainer ranks, their tensor parallelism, replicas and the engines' names.
        total_steps: of the run, for the schedule.
        events: what happened since the step before.
        checkpoint: the nearest before the step; None where there was none.
        rounds: its local updates.
        replicas: names that ``segments`` of the rows index.
        decisions: the events of the step that say what was decided: selections, evictions, switches.
        params_sha256: of the parameters after it, as ``params_digest`` of the model engine gives it.
        critic_sha256: of the critic's; empty without one.
        state_sha256: of each parameter and optimizer moment after it (record=full).
        metrics: of the whole step.
        failure: why it has no end; then there are no digests of what came after it, and its last local update holds
            what there was of it.
    """

    schema: int
    rlctl_version: str
    step: int
    version: int
    attempt: int
    mode: str
    config_sha256: str
    fingerprint: dict[str, Any]
    layout: dict[str, Any]
    total_steps: int
    events: EventRange
    checkpoint: CheckpointRef | None
    rounds: list[RoundInfo]
    replicas: list[str]
    decisions: list[dict[str, Any]]
    params_sha256: str
    critic_sha256: str
    state_sha256: dict[str, str]
    metrics: dict[str, Figure]
    failure: Failure | None = None


class Pin(msgspec.Struct, frozen=True):
    """A step that is kept beyond the window: why, and the checkpoint that leads to it (None: there is none)."""

    step: int
    why: list[str]
    checkpoint: int | None


def step_folder(records: Path, step: int) -> Path:
    """Return the folder of a step's record."""
    return records / f"step_{step:08d}"


def recorded_steps(records: Path) -> list[int]:
    """Return the steps that have a record in ``records``, in order."""
    if not records.is_dir():
        return []
    return sorted(int(m.group(1)) for p in records.iterdir() if (m := _NAME.match(p.name)))
