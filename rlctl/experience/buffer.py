"""Where prompt groups wait between being submitted and being trained. Whole groups only, always in order."""

from __future__ import annotations

import threading
from itertools import takewhile
from typing import Any

import msgspec

from rlctl.experience.admission import Admission
from rlctl.experience.groups import PromptGroup, Response


class GroupBuffer:
    """Groups by ordinal. Any thread may call anything; what takes several calls is done holding ``changed``.

    Args:
        admission: what is admitted and chosen. None bounds nothing: selection takes finished groups, the lowest ordinal
            first, whatever order they finished in.

    Attributes:
        changed: a re-entrant condition, notified whenever something in here changed.
        changes: how often that was; also how often what fills it has come to rest.
        selected: groups taken for training since the start of the run.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = admission
        self.changed = threading.Condition(threading.RLock())
        self.changes = 0
        self.selected = 0
        self._origin = 0
        self._groups: dict[int, PromptGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def submitted(self) -> int:
        """Groups admitted since the start of the run and not evicted."""
        with self.changed:
            return self.selected + len(self._groups)

    def tell(self) -> None:
        """Wake those who wait: something has changed, in here or in what fills it."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def submit(self, group: PromptGroup) -> None:
        """Admit a new group. Raises ValueError when its ordinal is here already."""
        with self.changed:
            if group.ordinal in self._groups:
                raise ValueError(f"prompt {group.ordinal} was submitted twice")
            self._groups[group.ordinal] = group
            self.tell()

    def complete(self, response: Response) -> PromptGroup:
        """File a finished response under its group and return the group."""
        with self.changed:
            group = self._groups[response.key.ordinal]
            group.add(response)
            self.tell()
            return group

    def goes_on(self, response: Response) -> PromptGroup:
        """File a response that goes on under its group and return the group."""
        with self.changed:
            group = self._groups[response.key.ordinal]
            group.goes_on(response)
            self.tell()
            return group

    def starts_again(self, ordinal: int, sample: int) -> PromptGroup:
        """Forget a response that was under way and return its group."""
        with self.changed:
            group = self._groups[ordinal]
            group.under_way.pop(sample, None)
            self.tell()
            return group

    def group_of(self, ordinal: int) -> PromptGroup:
        """Return a group that is here."""
        with self.changed:
            return self._groups[ordinal]

    def finished(self) -> list[PromptGroup]:
        """Return the groups that are whole, by ordinal."""
        with self.changed:
            return [g for g in self._ordered() if g.finished]

    def unfinished(self) -> list[PromptGroup]:
        """Return the groups that still wait for responses, by ordinal."""
        with self.changed:
            return [g for g in self._ordered() if g.status in ("pending", "running")]

    def prefix(self) -> int:
        """Return how many of the lowest ordinals here are whole, without a gap."""
        with self.changed:
            return len(list(takewhile(lambda group: group.finished, self._ordered())))

    def ages(self, version: int) -> dict[int, int]:
        """Return the age of each group here, by ordinal: ``version`` less that of its oldest token."""
        with self.changed:
            return {group.ordinal: version - group.oldest_version for group in self._ordered()}

    def room(self, version: int) -> int:
        """Return how many groups may be submitted while ``version`` generates."""
        assert self.admission is not None
        with self.changed:
            return self.admission.room(self._ordered(), self.submitted, version, self._origin)

    def goal(self, version: int, ahead: int) -> int:
        """Return ``selected + prefix()`` once the batch that follows ``version`` is there, and ``ahead`` more; no more
        than may be admitted under ``version``."""
        assert self.admission is not None
        wanted = self._origin + (version + 1 + ahead) * self.admission.batch
        return min(wanted, self.admission.limit(version, self._origin))

    def expire(self, version: int) -> list[tuple[int, int]]:
        """Evict the groups that are too old for the weights of ``version``; return ordinal and age of each."""
        with self.changed:
            ordinals = [] if self.admission is None else self.admission.expired(self._ordered(), version)
            return [(ordinal, version - self.evict(ordinal).oldest_version) for ordinal in ordinals]

    def attainable(self, count: int, remaining: int | None) -> int:
        """Return how many of ``count`` groups can still come, of those here and ``remaining`` prompts of the data."""
        with self.changed:
            return count if remaining is None else min(count, len(self._groups) + remaining)

    def ready(self, count: int, version: int) -> bool:
        """Whether ``count`` groups can be selected for a step with the weights of ``version``."""
        with self.changed:
            return len(self._choice(count, version)) >= count

    def select(self, count: int, version: int | None = None) -> list[PromptGroup]:
        """Remove and return ``count`` groups.

        Args:
            count: how many.
            version: of the step's weights, for the admission's bound.

        Raises:
            LookupError: fewer can be taken.
        """
        with self.changed:
            ready = self._choice(count, version)
            if len(ready) < count:
                raise LookupError(f"{len(ready)} finished groups, {count} asked for")
            chosen = [self._groups.pop(ordinal) for ordinal in ready]
            self.selected += count
            self.tell()
            return chosen

    def evict(self, ordinal: int) -> PromptGroup:
        """Remove and return a group that will not be trained. Raises KeyError when it is not here."""
        with self.changed:
            group = self._groups.pop(ordinal)
            self.tell()
            return group

    def state(self) -> dict[str, Any]:
        """Return everything in the buffer as plain data."""
        with self.changed:
            groups = [msgspec.to_builtins(group, str_keys=True) for group in self._ordered()]
            return {"groups": groups, "selected": self.selected}

    def load(self, state: dict[str, Any]) -> None:
        """Replace the content by an earlier ``state()``."""
        groups = msgspec.convert(state["groups"], list[PromptGroup], strict=False)
        with self.changed:
            self._groups = {g.ordinal: g for g in groups}
            self.selected = state.get("selected", 0)
            self.tell()

    def continue_from(self, step: int) -> None:
        """Count from here: ``step`` batches have been trained, of whatever size they were."""
        with self.changed:
            self._origin = self.selected - step * self.admission.batch if self.admission is not None else 0

    def _choice(self, count: int, version: int | None) -> list[int]:
        if self.admission is None or version is None:
            return [g.ordinal for g in self.finished()][:count]
        return self.admission.choose(
            self._ordered(), count, version=version, selected=self.selected, origin=self._origin
        )

    def _ordered(self) -> list[PromptGroup]:
        return [group for _, group in sorted(self._groups.items())]
