"""Whether an attempt began where the one that it went on from stood."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from rlctl.config.keytable import key_table, set_value
from rlctl.experience.schedule_events import GroupStanding, ScheduleBegan
from rlctl.experience.standing import standing_of
from rlctl.replay.scheduling.expecting import require
from rlctl.replay.scheduling.grouping import Grouping
from rlctl.schema import Config
from rlctl.trainers.standing import settings_of


@dataclass(frozen=True)
class Standing:
    """Where an attempt stood when a checkpoint was made."""

    step: int
    ordinal: int
    selected: int
    groups: Sequence[GroupStanding]
    measured: dict[str, float]

    @classmethod
    def of(cls, grouping: Grouping, measured: dict[str, float]) -> Standing:
        """Return where it stands."""
        buffer = grouping.buffer
        return cls(grouping.version, grouping.prompts.ordinal, buffer.selected, standing_of(buffer), measured)

    def require(self, began: ScheduleBegan) -> None:
        """Raise DisagreementError when an attempt that goes on from here began elsewhere."""
        for name in ("ordinal", "selected", "groups", "measured"):
            here, told = getattr(self, name), getattr(began, name)
            require(told == here, began, "resume", f"{name}: {told}, and the attempt before it stood at {here}")


def config_of(began: ScheduleBegan, config: Config, *, last: bool) -> Config:
    """Return the configuration of an attempt.

    Args:
        began: where it stood.
        config: of the run; that of its last attempt.
        last: whether this is the last attempt.

    Raises:
        DisagreementError: the last attempt had other settings than the configuration.
    """
    mine = settings_of(config)
    theirs = deepcopy(config)
    for key, value in began.settings.items():
        require(key in key_table(), began, "configuration", f"{key} is no key of this version")
        said = f"{key} is {mine.get(key)} in the configuration, and the run had {value}"
        require(not last or mine.get(key) == value, began, "configuration", said)
        set_value(theirs, key, value)
    return theirs
