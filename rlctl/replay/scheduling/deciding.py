"""All that decides in one attempt, driven by its events."""

from __future__ import annotations

from rlctl.experience.event_base import Event
from rlctl.experience.events import StepEnded
from rlctl.experience.schedule_events import ScheduleBegan
from rlctl.replay.scheduling.expecting import require
from rlctl.replay.scheduling.grouping import Grouping
from rlctl.replay.scheduling.standing import Standing
from rlctl.schema import Config


class Deciding:
    """What decides, told again.

    Args:
        config: of the attempt.
        began: where it stood.
    """

    def __init__(self, config: Config, began: ScheduleBegan) -> None:
        self._grouping = Grouping(config, began)

    def take(self, event: Event) -> None:
        """Take the next event. Raises DisagreementError."""
        if type(event) in self._grouping.handlers:
            self._grouping.take(event)
        if isinstance(event, StepEnded):
            self._step_ended(event)

    def standing(self) -> Standing:
        """Return where it stands."""
        return Standing.of(self._grouping, {})

    def _step_ended(self, event: StepEnded) -> None:
        step = self._grouping.step
        require(event.step == step, event, "step", f"step {step} is under way")
        require(self._grouping.rounds > 0, event, "step", "no groups were selected for it")
        version = self._grouping.version
        require(event.version == step == version, event, "sync", f"version {version} generates after it")
        self._grouping.step, self._grouping.rounds = step + 1, 0
