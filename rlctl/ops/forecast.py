"""What a run will take, predicted: memory by phase, bytes and seconds of a weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlctl.errors import UsageError
from rlctl.ops.memory_profile import MemoryProfile, profile_memory
from rlctl.ops.planned_model import planned_model
from rlctl.ops.resolve import Resolution
from rlctl.ops.topology_plan import plan_topology
from rlctl.units import format_bytes, format_duration

_CODES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Forecast:
    """Predictions for a run.

    Attributes:
        memory: by rank and phase; None when it is not known.
        sync_bytes: bytes that one sync moves between devices; None when that is not known.
        sync_seconds: what they take by the profile's link speeds; None when it states none. ``bottleneck`` says which
            link sets them.
        unknown: why something is not known; empty when all is.
    """

    memory: MemoryProfile | None = None
    sync_bytes: int | None = None
    sync_seconds: float | None = None
    bottleneck: str = ""
    unknown: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """Return it as lines for people: (what, how much)."""
        found: list[tuple[str, str]] = []
        if self.memory is not None:
            estimate = self.memory.estimate
            peak = estimate.peak
            of = f" of {format_bytes(estimate.limit)}, {self.memory.limit_of}" if estimate.limit else ""
            verdict = {True: "fits", False: "does not fit", None: "no limit stated"}[estimate.fits]
            found.append(("memory", f"{format_bytes(peak.nbytes)}{of}, in {peak.name} ({peak.devices}): {verdict}"))
        if self.sync_bytes is not None:
            found.append(("a weight sync moves", f"{format_bytes(self.sync_bytes)} between devices"))
        if self.sync_seconds is not None and self.sync_bytes:
            found.append(("and takes", f"{format_duration(self.sync_seconds)} at least (set by {self.bottleneck})"))
        if self.unknown:
            found.append(("not predicted", self.unknown))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        memory = None
        if self.memory is not None:
            estimate = self.memory.estimate
            memory = {
                "peak_bytes": estimate.peak.nbytes,
                "phase": estimate.peak.name,
                "devices": estimate.peak.devices,
                "limit_bytes": estimate.limit or None,
                "fits": estimate.fits,
            }
        return {
            "memory": memory,
            "sync": {"bytes": self.sync_bytes, "predicted_s": self.sync_seconds, "bottleneck": self.bottleneck or None},
            "not_predicted": self.unknown or None,
        }


def forecast(resolution: Resolution) -> Forecast:
    """Predict what the run that ``resolution`` describes will take.

    What cannot be known here (a model that is neither a preset nor at hand, ranks that it cannot be dealt out over) is
    said, and fails nothing: the rules say what does.
    """
    if resolution.violations:
        return Forecast(unknown="the run could not start as it is; see the checks")
    config = resolution.config
    try:
        memory = profile_memory(resolution)
        model = planned_model(config.model.path, _CODES[config.model.dtype], where="model.path")
        plan = plan_topology(resolution.resolved.profile or "", config, model)
    except UsageError as error:
        return Forecast(unknown=error.message)
    prediction = plan.prediction
    return Forecast(
        memory,
        plan.moved,
        None if prediction is None else prediction.seconds,
        "" if prediction is None else prediction.bottleneck,
    )
