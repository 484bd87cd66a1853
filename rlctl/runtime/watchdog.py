"""A run that waits for responses and sees nothing change: it says who waits on what, tries once more, then fails."""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Sequence

from rlctl.errors import RlctlError
from rlctl.experience.groups import PromptGroup
from rlctl.units import format_duration

_MOST_NAMED = 8


class StalledError(RlctlError):
    """Nothing happened for so long that nothing will."""


class Watchdog:
    """Watches a wait. Whoever waits asks ``due`` now and then, and calls ``act`` when it is; each wait begins with
    ``begin``.

    After ``patience`` seconds without a change it tells who waits on what, with the stacks of all threads, and has
    what is under way queued again; after as long again it fails.

    Args:
        patience: seconds.
        changes: a number that is another one whenever a group has changed its state.
        waiting: says, a line each, what is waited for and on whom.
        requeue: queues again what is under way.
        tell: where the report goes.
        clock: seconds, of any origin.
    """

    def __init__(
        self,
        patience: float,
        *,
        changes: Callable[[], int],
        waiting: Callable[[], Sequence[str]],
        requeue: Callable[[], None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = patience
        self._changes = changes
        self._waiting = waiting
        self._requeue = requeue
        self._tell = tell
        self._clock = clock
        self._seen = -1
        self._since = 0.0
        self._tried = False

    def begin(self) -> None:
        """A wait begins: what went before does not count."""
        self._seen, self._since, self._tried = self._changes(), self._clock(), False

    def due(self) -> bool:
        """Look whether something has changed, and return whether nothing did for too long."""
        now, seen = self._clock(), self._changes()
        if seen != self._seen:
            self._seen, self._since, self._tried = seen, now, False
        return now - self._since >= self._patience

    def act(self) -> None:
        """Tell who waits on what and have it queued again. Raises StalledError when that was tried already."""
        for_so_long = format_duration(self._patience)
        who = "\n".join(f"  {line}" for line in self._waiting())
        if self._tried:
            raise StalledError(
                f"nothing was generated for {for_so_long}, twice, also after all requests were queued again:\n{who}",
                fix="the replicas' logs say what they do; continue with --resume auto, or raise trainer.stall_timeout",
            )
        self._tell(
            f"nothing was generated for {for_so_long}; what is under way is queued again. Waiting:\n{who}\n"
            f"stacks of this process:\n{stacks()}"
        )
        self._tried = True
        self._requeue()
        # What the requeuing itself changes is no sign of life, and it may have taken its time.
        self._seen, self._since = self._changes(), self._clock()


def stacks() -> str:
    """Return where each thread of this process is."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def missing_responses(groups: Sequence[PromptGroup]) -> list[str]:
    """Return a line for each group that is not whole, the oldest first: which of its responses are waited for."""
    lines = []
    for group in groups[:_MOST_NAMED]:
        missing = [index for index in range(group.size) if index not in group.responses]
        made = sum(response.sampled for response in group.under_way.values())
        lines.append(
            f"prompt {group.ordinal}, dispatched under version {group.dispatched}, waits for {len(missing)} of "
            f"{group.size} responses ({', '.join(map(str, missing[:_MOST_NAMED]))}"
            f"{', ...' if len(missing) > _MOST_NAMED else ''}); {made} tokens of them are known"
        )
    if len(groups) > _MOST_NAMED:
        lines.append(f"and {len(groups) - _MOST_NAMED} more prompts")
    return lines
