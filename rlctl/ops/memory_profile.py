"""``rlctl memory-profile`` as a function: where the memory of a run goes, whether it fits, and what would help."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from rlctl.config import Resolved
from rlctl.errors import CheckError, UsageError
from rlctl.hardware.local import this_machine
from rlctl.memory.advice import Advice, advise
from rlctl.memory.allocator_settings import sleeping_engine_note
from rlctl.memory.engine_memory import sequence_kv_bytes
from rlctl.memory.estimate import Estimate, estimate
from rlctl.memory.imbalance import heavier_ranks
from rlctl.memory.largest import Largest, largest
from rlctl.memory.staging import WakePeaks, wake_peaks
from rlctl.memory.workload import Workload
from rlctl.ops.kept_shards import kept_of
from rlctl.ops.model_spec import models_beside, spec_of
from rlctl.ops.resolve import Resolution
from rlctl.runtime.threads import thread_count
from rlctl.schema import Config
from rlctl.trainers.contracts import ModeContract, check
from rlctl.units import format_bytes


@dataclass(frozen=True)
class MemoryProfile:
    """A run's memory.

    Attributes:
        profile, model: as named.
        resolved: the configuration.
        estimate: by rank and phase.
        limit_of: in words, whose memory the limit is.
        wake: both ways of waking an engine on shared devices; None where it has its own.
        largest: what still fits.
        advice: changes, most bytes saved first; empty when it fits.
        notes: what a person should know.
    """

    profile: str | None
    model: str
    resolved: Resolved
    estimate: Estimate
    limit_of: str
    wake: WakePeaks | None
    largest: tuple[Largest, ...]
    advice: tuple[Advice, ...]
    rank_peaks: tuple[int, ...]
    notes: tuple[str, ...]

    def document(self, measured: dict[str, int] | None = None) -> dict[str, Any]:
        """Return it as plain data; ``measured`` is phase -> bytes."""
        found, peaks = self.estimate, self.rank_peaks
        return {
            "profile": self.profile,
            "model": self.model,
            "ranks": [
                {"devices": rank.devices, "rank": rank.rank, "parts": dict(rank.parts), "peak_bytes": peak}
                for rank, peak in zip(found.ranks, peaks, strict=True)
            ],
            "phases": [
                {
                    "name": phase.name,
                    "devices": phase.devices,
                    "rank": phase.rank,
                    "predicted_bytes": phase.nbytes,
                    "measured_bytes": (measured or {}).get(phase.name),
                    "parts": dict(phase.parts),
                }
                for phase in found.phases
            ],
            "peak": {"phase": found.peak.name, "devices": found.peak.devices, "bytes": found.peak.nbytes},
            "limit_bytes": found.limit or None,
            "fits": found.fits,
            "wake": None
            if self.wake is None
            else {"at_once": self.wake.at_once, "staged": self.wake.staged, "stages": dict(self.wake.stages)},
            "largest": [asdict(item) for item in self.largest],
            "advice": [asdict(item) for item in self.advice],
            "imbalance": [asdict(item) for item in heavier_ranks(peaks)],
            "notes": list(self.notes),
        }


def profile_memory(resolution: Resolution) -> MemoryProfile:
    """Predict the memory of the run that ``resolution`` describes.

    Raises UsageError when a rule of the run is violated, or the model is not known or cannot be dealt out over ranks.
    """
    resolution.require_valid()
    config = resolution.config
    spec = spec_of(config.model.path)
    beside, unknown = models_beside(config, spec)
    work = Workload(config, spec, threads=thread_count(config.run.threads), beside=beside, kept=kept_of)
    contract = resolution.contract
    limit, limit_of = _limit(config)
    found = _estimate(work, contract, limit)
    phases = contract.memory_phases(config)
    return MemoryProfile(
        profile=resolution.resolved.profile,
        model=config.model.path,
        resolved=resolution.resolved,
        estimate=found,
        limit_of=limit_of,
        wake=_wake(found, config),
        largest=tuple(largest(work, lambda w: _fits(w, contract, limit))) if limit else (),
        advice=tuple(advise(work, lambda w: _peak(w, contract, limit))) if found.fits is False else (),
        rank_peaks=tuple(found.rank_peaks(phases)),
        notes=(*_notes(work, found), *unknown),
    )


def require_fit(found: MemoryProfile) -> None:
    """Raise CheckError when the peak is more than a device has."""
    if found.estimate.fits is not False:
        return
    peak = found.estimate.peak
    raise CheckError(
        f"does not fit: {peak.name} needs {format_bytes(peak.nbytes)} on {found.limit_of}, "
        f"which has {format_bytes(found.estimate.limit)}",
        fix=f"try {found.advice[0].change}" if found.advice else "take more devices, or a smaller model",
    )


def _estimate(work: Workload, contract: ModeContract, limit: int) -> Estimate:
    return estimate(work, contract.memory_phases(work.config), limit=limit)


def _peak(work: Workload, contract: ModeContract, limit: int) -> int:
    """Return the bytes of the fullest moment. Raises UsageError for a run that could not be started."""
    for result in check(work.config, contract):
        if result.status == "violated":
            raise UsageError(result.message)
    return _estimate(work, contract, limit).peak.nbytes


def _fits(work: Workload, contract: ModeContract, limit: int) -> bool:
    """Whether a run fits and is one that could be started."""
    try:
        return _peak(work, contract, limit) <= limit
    except UsageError:
        return False


def _limit(config: Config) -> tuple[int, str]:
    """Return the bytes that one rank may use, and whose they are."""
    cluster, place = config.cluster, config.placement
    if cluster.device != "cpu":
        return cluster.device_memory, f"one {cluster.device_name or cluster.device}"
    ranks = place.trainer_ranks if place.layout != "separate" else place.trainer_ranks + place.replicas
    each = max(-(-ranks // cluster.nodes), 1)
    if cluster.host_memory:
        return cluster.host_memory // each, "the node's memory" + (f" over {each} ranks" if each > 1 else "")
    return this_machine().memory // each, "this machine's memory" + (f" over {each} ranks" if each > 1 else "")


def _wake(found: Estimate, config: Config) -> WakePeaks | None:
    if config.placement.layout == "separate":
        return None
    parts = found.ranks[0].parts
    trainer = parts["trainer_weights"] + parts["optimizer"]
    return wake_peaks(
        trainer=trainer,
        new_weights=parts["buckets"],
        engine_weights=parts["engine_weights"],
        kv_cache=parts["kv_cache"],
        stays=trainer if config.cluster.device == "cpu" else 0,
    )


def _notes(work: Workload, found: Estimate) -> list[str]:
    notes = []
    place, spec = work.config.placement, work.spec
    if place.replica_tp > spec.kv_heads and spec.mla is None:
        copies = place.replica_tp // spec.kv_heads
        notes.append(f"key and value heads are kept {copies} times: replica_tp {place.replica_tp} > {spec.kv_heads}")
    if work.config.cluster.device == "cuda" and place.layout != "separate":
        notes += filter(None, [sleeping_engine_note(os.environ)])
    if found.fits is None:
        notes.append("the profile does not state the memory of a device: cluster.device_memory=80GB would")
    if not work.embedded:
        cache = max((rank.parts.get("kv_cache", 0) for rank in found.ranks), default=0)
        held = cache // max(sequence_kv_bytes(work), 1)
        if held < work.replica_rows:
            notes.append(
                f"the KV cache holds {held} responses of full length; the other {work.replica_rows - held} of a "
                "replica's slots wait or are preempted when all grow that long"
            )
    return notes
