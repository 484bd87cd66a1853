"""What is reported of a step beside what its stages found: times, rates, how long each side had nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.sync.report import SyncReport
from rlctl.trainers.step import StepState

# Stages that run rows through a model.
TRAINING = ("old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")
# Stages in which the trainer works; in the others it waits.
WORKING = ("reward", "balance", *TRAINING, "advantages")


@dataclass
class SyncTotals:
    """Syncs since the last ``take``. ``stall``: how long replicas served nothing, the longest of each sync;
    ``bytes``: that left trainer ranks; ``kept``: what the fullest device keeps of the last one while it trains."""

    count: int = 0
    seconds: float = 0.0
    stall: float = 0.0
    bytes: int = 0
    kept: int = 0

    def add(self, report: SyncReport) -> None:
        """Count a sync that has ended."""
        self.count += 1
        self.seconds += report.seconds
        self.stall += report.stall
        self.bytes += report.bytes
        self.kept = report.kept_nbytes

    def take(self) -> dict[str, float]:
        """Return the figures and begin anew."""
        figures = {"syncs": float(self.count), "sync_seconds": self.seconds, "sync_stall_seconds": self.stall}
        figures |= {"sync_bytes": float(self.bytes), "sync_kept_bytes": float(self.kept)}
        self.count, self.seconds, self.stall, self.bytes = 0, 0.0, 0.0, 0
        return figures


def step_figures(step: StepState, seconds: float) -> dict[str, float]:
    """Return times by phase, rates and bubbles of a step that took ``seconds`` in all.

    A bubble is the share of the step in which a side did no work of its own: of the trainer, all but the stages that
    score and train; of the rollout side, all but decoding. Rollouts that are ``MeasuredRollouts`` may know better.
    """
    train = sum(step.seconds.get(name, 0.0) for name in TRAINING)
    work = sum(step.seconds.get(name, 0.0) for name in WORKING)
    generating = step.metrics["rollout_seconds"]
    return {f"seconds_{name}": value for name, value in step.seconds.items()} | {
        "seconds": seconds,
        "generate_tokens_per_s": step.metrics["generated_tokens"] / generating if generating else 0.0,
        "train_tokens_per_s": step.metrics["trained_tokens"] / train if train else 0.0,
        "samples_per_s": step.metrics["samples"] / seconds,
        "bubble_trainer": max(0.0, 1.0 - work / seconds),
        "bubble_rollout": max(0.0, 1.0 - generating / seconds),
    }
