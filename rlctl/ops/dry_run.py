"""A run laid out on paper: who runs where, what a step handles, which checks hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlctl.hardware.local import Machine
from rlctl.hardware.placement import PlacementError, Slot, place
from rlctl.ops.forecast import Forecast, forecast
from rlctl.ops.requirements import Needs, compare
from rlctl.ops.resolve import Resolution
from rlctl.trainers.algorithm_words import algorithm_words
from rlctl.trainers.arithmetic import StepArithmetic, step_arithmetic
from rlctl.trainers.contracts import CheckResult


@dataclass(frozen=True)
class DryRun:
    """The plan of a run.

    Attributes:
        layout: every rank with its device; empty when the ranks do not fit.
        step: what a step handles.
        total_prompts: prompts of all steps.
        algorithm: what the algorithm amounts to, part -> words.
        checks: the outcome of every rule.
        hardware: what a node needs against what is here; unmet needs do not fail a dry run.
        forecast: predicted memory and weight sync.
    """

    profile: str | None
    mode: str
    mode_summary: str
    backend: str
    engine: str
    layout: tuple[Slot, ...]
    step: StepArithmetic
    steps: int
    total_prompts: int
    algorithm: dict[str, str]
    checks: tuple[CheckResult, ...]
    hardware: Needs
    forecast: Forecast

    @property
    def valid(self) -> bool:
        """Whether every rule holds."""
        return all(result.status != "violated" for result in self.checks)

    def arithmetic(self) -> list[tuple[str, str]]:
        """Return the numbers of a step as lines for people: (what, how much and why)."""
        s = self.step
        per_prompt = s.samples // s.prompts
        return [
            ("train batch", f"{s.prompts} prompts x {per_prompt} = {s.samples} samples"),
            ("updates a step", f"{s.updates}, each {s.mini_batch_prompts} prompts = {s.mini_batch_samples} samples"),
            ("samples a rank", f"{s.samples_per_rank} an update over {s.data_parallel} data-parallel ranks"),
            ("micro-batches", f"at most {s.micro_batches} an update and rank"),
            ("tokens a step", f"at most {s.samples} x {s.sequence_tokens} = {s.tokens:,}"),
            ("requests a replica", f"{s.requests_per_replica} a step; rounds of its slots: {s.rounds}"),
            ("run", f"{self.steps} steps = {self.total_prompts:,} prompts"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "profile": self.profile,
            "mode": self.mode,
            "backend": self.backend,
            "engine": self.engine,
            "valid": self.valid,
            "layout": [asdict(slot) for slot in self.layout],
            "step": asdict(self.step),
            "steps": self.steps,
            "total_prompts": self.total_prompts,
            "algorithm": self.algorithm,
            "checks": [asdict(result) for result in self.checks],
            "hardware": {**asdict(self.hardware), "met": self.hardware.met},
            "forecast": self.forecast.to_json(),
        }


def plan_run(resolution: Resolution, machine: Machine | None = None) -> DryRun:
    """Lay out the run that ``resolution`` describes; ``machine`` stands in for this one."""
    config = resolution.config
    try:
        layout = tuple(place(config.cluster, config.placement))
    except PlacementError:
        layout = ()  # the rule devices_suffice says so
    return DryRun(
        profile=resolution.resolved.profile,
        mode=config.trainer.mode,
        mode_summary=resolution.contract.summary,
        backend=config.sync.backend,
        engine=config.rollout.engine,
        layout=layout,
        step=step_arithmetic(config),
        steps=config.run.steps,
        total_prompts=config.run.steps * config.trainer.prompts_per_step,
        algorithm=algorithm_words(config),
        checks=resolution.checks,
        hardware=compare(config.cluster, machine),
        forecast=forecast(resolution),
    )
