"""How far a run's generation may be ahead, as its configuration says."""

from __future__ import annotations

from rlctl.experience.admission import Admission
from rlctl.schema import Config


def admission_of(config: Config, steps: int) -> Admission:
    """Return the admission of a run of ``steps`` steps; what neither the user nor the mode has set is strictly
    on-policy."""
    trainer = config.trainer
    return Admission(
        policy=trainer.admission or "pacing",
        batch=trainer.prompts_per_step,
        max_staleness=trainer.max_staleness or 0,
        warmup=trainer.warmup_batches or 0.0,
        in_order=config.run.deterministic,
        batches=steps,
    )
