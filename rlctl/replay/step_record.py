"""What a replay needs of a recorded run, whatever it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlctl.experience.records.manifest import Failure
from rlctl.experience.records.reading import Round
from rlctl.schema import Config


@dataclass(frozen=True)
class StepRecord:
    """A trained step.

    Attributes:
        step: its number; the weights carry this version after it.
        config: that it was trained under.
        rounds: its local updates.
        params_digest: of the parameters after it; empty where not recorded.
        critic_digest: of the critic's; empty without one.
        fingerprint: what it was computed with.
        total_steps: of the run, for the schedule.
        failure: that it ended with.
    """

    step: int
    config: Config
    rounds: Sequence[Round]
    params_digest: str
    critic_digest: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int = 1
    failure: Failure | None = None


class Source(Protocol):
    """A recorded run."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps with a record, in order."""

    @property
    def checkpoints(self) -> Sequence[int]:
        """Steps after which there is a checkpoint, in order."""

    def step(self, number: int) -> StepRecord:
        """Return a step's record. Raises RlctlError when it cannot be read."""

    def states(self, number: int) -> Mapping[str, Any]:
        """Return what a checkpoint holds, by part. Raises RlctlError when it cannot be read, or changed."""
