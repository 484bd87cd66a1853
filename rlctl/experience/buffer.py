"""Where prompt groups wait between being submitted and being trained. Whole groups only, always in order."""

from __future__ import annotations

from typing import Any

import msgspec

from rlctl.experience.groups import PromptGroup, Response


class GroupBuffer:
    """Groups by ordinal. Selection takes finished groups, the lowest ordinal first, whatever order they finished in."""

    def __init__(self) -> None:
        self._groups: dict[int, PromptGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def submit(self, group: PromptGroup) -> None:
        """Admit a new group. Raises ValueError when its ordinal is here already."""
        if group.ordinal in self._groups:
            raise ValueError(f"prompt {group.ordinal} was submitted twice")
        self._groups[group.ordinal] = group

    def complete(self, response: Response) -> PromptGroup:
        """File a finished response under its group and return the group."""
        group = self._groups[response.key.ordinal]
        group.add(response)
        return group

    def goes_on(self, response: Response) -> PromptGroup:
        """File a response that goes on under its group and return the group."""
        group = self._groups[response.key.ordinal]
        group.goes_on(response)
        return group

    def group_of(self, ordinal: int) -> PromptGroup:
        """Return a group that is here."""
        return self._groups[ordinal]

    def finished(self) -> list[PromptGroup]:
        """Return the groups that could be trained, by ordinal."""
        return [g for _, g in sorted(self._groups.items()) if g.status == "finished"]

    def unfinished(self) -> list[PromptGroup]:
        """Return the groups that still wait for responses, by ordinal."""
        return [g for _, g in sorted(self._groups.items()) if g.status in ("pending", "running")]

    def select(self, count: int) -> list[PromptGroup]:
        """Remove and return ``count`` finished groups. Raises LookupError when fewer are there."""
        ready = self.finished()
        if len(ready) < count:
            raise LookupError(f"{len(ready)} finished groups, {count} asked for")
        chosen = ready[:count]
        for group in chosen:
            del self._groups[group.ordinal]
        return chosen

    def evict(self, ordinal: int) -> PromptGroup:
        """Remove and return a group that will not be trained. Raises KeyError when it is not here."""
        return self._groups.pop(ordinal)

    def state(self) -> dict[str, Any]:
        """Return everything in the buffer as plain data."""
        return {"groups": [msgspec.to_builtins(g, str_keys=True) for _, g in sorted(self._groups.items())]}

    def load(self, state: dict[str, Any]) -> None:
        """Replace the content by an earlier ``state()``."""
        groups = msgspec.convert(state["groups"], list[PromptGroup], strict=False)
        self._groups = {g.ordinal: g for g in groups}
