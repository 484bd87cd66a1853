"""All that decides in one attempt, driven by its events."""

from __future__ import annotations

from rlctl.experience.event_base import Event
from rlctl.experience.events import StepEnded
from rlctl.experience.schedule_events import ScheduleBegan
from rlctl.replay.scheduling.expecting import require
from rlctl.replay.scheduling.grouping import Grouping
from rlctl.replay.scheduling.lending import Lending
from rlctl.replay.scheduling.routing import Routing
from rlctl.replay.scheduling.standing import Standing
from rlctl.replay.scheduling.syncing import Syncing
from rlctl.schema import Config
from rlctl.trainers.beside import BesideTrainer
from rlctl.trainers.modes.separate_async import SeparateAsyncTrainer
from rlctl.trainers.registry import get_trainer_cls


class Deciding:
    """What decides, told again.

    Args:
        config: of the attempt.
        began: where it stood.
    """

    def __init__(self, config: Config, began: ScheduleBegan) -> None:
        mode = get_trainer_cls(config.trainer.mode)
        self._updates = config.trainer.parameter_sync_step or 1
        self._grouping = Grouping(config, began)
        self._routing = Routing(deterministic=config.run.deterministic)
        self._lending = Lending(config, began, self._grouping.buffer, lends=issubclass(mode, SeparateAsyncTrainer))
        self._syncing = Syncing(config, began, beside=issubclass(mode, BesideTrainer))
        self._parts = (self._lending, self._syncing, self._grouping, self._routing)

    def take(self, event: Event) -> None:
        """Take the next event. Raises DisagreementError."""
        for part in self._parts:
            if type(event) in part.handlers:
                part.take(event)
        if self._grouping.rounds:
            self._syncing.due = self._grouping.step
        if isinstance(event, StepEnded):
            self._step_ended(event)

    def standing(self) -> Standing:
        """Return where it stands."""
        return Standing.of(self._grouping, self._lending.figures())

    def _step_ended(self, event: StepEnded) -> None:
        step = self._grouping.step
        require(event.step == step, event, "step", f"step {step} is under way")
        rounds, there = self._grouping.rounds, self._grouping.prompts.remaining != 0 or len(self._grouping.buffer)
        require(rounds == self._updates or not there, event, "step", f"{rounds} of {self._updates} updates had groups")
        version = self._grouping.version
        require(event.version == step == version, event, "sync", f"version {version} generates after it")
        self._grouping.step, self._grouping.rounds = step + 1, 0
