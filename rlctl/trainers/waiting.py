"""Waiting for the rollout side, watched: what never comes ends in an error that says who waited on what."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.experience.events import Noted
from rlctl.runtime.watchdog import Watchdog, missing_responses
from rlctl.trainers.parts import Parts


class Waits:
    """The waits of a run's trainer.

    Args:
        parts: of the run; ``trainer.stall_timeout`` says how long nothing may happen.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._dog = Watchdog(
            parts.config.trainer.stall_timeout,
            changes=lambda: parts.buffer.changes,
            waiting=self._waiting,
            requeue=parts.rollouter.requeue,
            tell=lambda message: parts.events.emit(Noted(message=message)),
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Generate, or wait while it is done in the background, until ``condition()`` holds, which is looked at when
        something in the buffer has changed, holding it.

        Raises:
            StalledError: nothing changes any more.
            RlctlError: nothing is under way, and the condition does not hold.
        """
        buffer, seen, holds = self._parts.buffer, -1, False

        def reached() -> bool:
            nonlocal seen, holds
            if not holds and seen != buffer.changes:
                holds = condition()
                seen = buffer.changes
            return holds or self._dog.due()

        self._dog.begin()
        self._parts.rollouter.run(reached)
        while not holds:
            self._dog.act()
            self._parts.rollouter.run(reached)

    def _waiting(self) -> list[str]:
        parts = self._parts
        serving = ", ".join(
            f"{name} serves {'nothing' if version is None else f'version {version}'}"
            for name, version in parts.rollouts.versions().items()
        )
        return [
            *missing_responses(parts.buffer.unfinished()),
            f"the rollout side: {parts.rollouter.describe()}",
            f"replicas: {serving}",
        ]
