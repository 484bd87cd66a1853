"""From what a user gave to a configuration that a run can trust: loaded, completed by the mode, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.algorithms.presets import ALGORITHM_PRESETS, CORRECTION_PRESETS, preset_values
from rlctl.algorithms.registry import ADVANTAGES, LOSSES
from rlctl.config import DEFAULT_PROFILE, Layer, Resolved, load_config
from rlctl.errors import Finding, FindingsError
from rlctl.model.registry import MODEL_ENGINES
from rlctl.rollout.registry import ROLLOUT_ENGINES
from rlctl.rollout.traits import ENGINE_TRAITS
from rlctl.schema import Config
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.traits import BACKEND_TRAITS
from rlctl.trackers.registry import TRACKERS
from rlctl.trainers.contracts import CONTRACTS, CheckResult, ModeContract, check, defaults
from rlctl.trainers.registry import TRAINERS

#: Keys whose values name something that other packages may add to -> the names known here.
OPEN_CHOICES = {
    "trainer.mode": lambda: list(dict.fromkeys([*CONTRACTS, *TRAINERS.names()])),
    "rollout.engine": lambda: list(dict.fromkeys([*ENGINE_TRAITS, *ROLLOUT_ENGINES.names()])),
    "model.engine": lambda: [name for name in MODEL_ENGINES.names() if name != "lora"],  # model.lora.rank asks for it
    "sync.backend": lambda: list(dict.fromkeys([*BACKEND_TRAITS, *CHECKPOINT_ENGINES.names()])),
    "algorithm.advantage": ADVANTAGES.names,
    "algorithm.loss": LOSSES.names,
    "run.trackers": TRACKERS.names,
    "algorithm.preset": lambda: list(ALGORITHM_PRESETS),
    "algorithm.rollout_correction.preset": lambda: list(CORRECTION_PRESETS),
}


@dataclass(frozen=True)
class Resolution:
    """A loaded configuration with the outcome of every check on it."""

    resolved: Resolved
    contract: ModeContract
    checks: tuple[CheckResult, ...]

    @property
    def config(self) -> Config:
        """The configuration itself."""
        return self.resolved.config

    @property
    def violations(self) -> list[Finding]:
        """Every rule that does not hold, placed where its key was set."""
        return [self._finding(result) for result in self.checks if result.status == "violated"]

    def require_valid(self) -> None:
        """Raise FindingsError with every violation, if there is one."""
        if self.violations:
            raise FindingsError("checks of the run", self.violations)

    def _finding(self, result: CheckResult) -> Finding:
        origin = self.resolved.origins.get(result.where or "")
        where = f"{result.where} ({origin})" if origin else result.where
        return Finding(result.message, where, result.fix)


def resolve(
    profile: str | None = DEFAULT_PROFILE,
    *,
    files: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    layers: Sequence[Layer] = (),
) -> Resolution:
    """Load the configuration, fill in the mode's defaults and check every rule; see ``load_config`` for the arguments.

    Violated rules are reported, not raised: a dry run shows them all.

    Raises:
        FindingsError: the configuration itself has faults.
    """
    resolved = load_config(
        profile,
        files=files,
        env=env,
        overrides=overrides,
        flags=flags,
        layers=layers,
        preset_values=preset_values,
        mode_defaults=lambda mode, config: defaults(contract_of(mode), config),
        open_choices=OPEN_CHOICES,
    )
    contract = contract_of(resolved.config.trainer.mode)
    return Resolution(resolved, contract, tuple(check(resolved.config, contract)))


def contract_of(mode: str) -> ModeContract:
    """Return the contract of a mode: a built-in one, the ``contract`` of a registered class, or an empty one."""
    if mode in CONTRACTS:
        return CONTRACTS[mode]
    declared = getattr(TRAINERS.load(mode), "contract", None)
    return declared if isinstance(declared, ModeContract) else ModeContract(mode, "registered by another package")
