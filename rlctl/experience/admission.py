"""How far generation may run ahead of training, and which finished groups a batch may take. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

Policy = Literal["pacing", "drop", "wait"]


class Standing(Protocol):
    """What admission asks of a group that waits."""

    @property
    def ordinal(self) -> int:
        """Position of its prompt in the data."""

    @property
    def dispatched(self) -> int:
        """Weight version when it was submitted."""

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token; ``dispatched`` before there is one."""

    @property
    def finished(self) -> bool:
        """Whether all its responses are there."""


@dataclass(frozen=True)
class Admission:
    """Bounds the age of what is trained: the version of a step's weights less that of the oldest token.

    Every version trains one batch, so all is counted from the start of the run, and nothing depends on a clock or on
    when a thread looks. Under version ``v`` at most ``(v + 1 + ahead) * batch`` groups have been admitted, those that
    were evicted not counted: each of those is replaced by exactly one.

    ``pacing`` (``ahead`` is the warm-up, but never more than the bound) drops nothing. A group dispatched under ``d``
    is due: it is trained with the weights of version ``d + max_staleness`` at the latest.

    - *What is due fits.* At most ``(D - max_staleness + 1 + ahead) * batch <= (D + 1) * batch`` groups are ever due by
      version ``D``, the room in batches 0 to ``D``. ``choose`` lets a group pass others that are due earlier only while
      for each earlier ``D`` those still due by then, less than the room left in batches up to ``D``, would fit
      without its place; so the inequality holds after each choice as it did before, and submitting keeps it too.
    - *Nothing waits for ever.* Were all that is there finished, the oldest would be taken first, which the inequality
      allows. So a batch that cannot be filled waits for a response under way, or for a group that the limit still
      allows: under ``v`` it allows all of batch ``v``, whatever ``ahead`` is. At the end of the data a batch is what
      is left.

    ``wait`` does the same, and admits nothing while a group that is not finished is as old as the bound.
    ``drop`` goes as far ahead as the warm-up says; finished groups that are older than the bound are evicted.

    Args:
        batch: prompts of a train batch.
        max_staleness: greatest age at which a token is trained.
        warmup: batches that are made ahead; may be a fraction.
        in_order: take groups by ordinal and wait for the lowest, so that what is trained does not depend on which
            response was faster.
        batches: train batches of the whole run, when that is known: nothing is made that none of them takes.
    """

    policy: Policy
    batch: int
    max_staleness: int
    warmup: float = 0.0
    in_order: bool = False
    batches: int | None = None

    @property
    def ahead(self) -> float:
        """Batches that may be admitted beyond the one that is being trained."""
        return self.warmup if self.policy == "drop" else min(self.warmup, float(self.max_staleness))

    def limit(self, version: int, origin: int = 0) -> int:
        """Return how many groups may have been admitted under ``version``, counted from the start of the run.

        Args:
            origin: what the count of selected groups was ahead of ``version * batch`` when the run was continued:
                other than 0 when earlier attempts had batches of another size.
        """
        ahead = math.floor((version + 1 + self.ahead) * self.batch)
        return origin + (ahead if self.batches is None else min(ahead, self.batches * self.batch))

    def room(self, groups: Iterable[Standing], admitted: int, version: int, origin: int = 0) -> int:
        """Return how many groups may be admitted now.

        Args:
            groups: all that wait.
            admitted: groups admitted since the start of the run and not evicted.
            version: of the weights that generate.
            origin: see ``limit``.
        """
        room = self.limit(version, origin) - admitted
        if room > 0 and self.policy == "wait":
            waits = (version - group.oldest_version >= self.max_staleness for group in groups if not group.finished)
            return 0 if any(waits) else room
        return max(0, room)

    def choose(
        self, groups: Sequence[Standing], count: int, *, version: int, selected: int, origin: int = 0
    ) -> list[int]:
        """Return the ordinals of up to ``count`` groups that may be trained now, oldest first. Fewer means: wait.

        Args:
            groups: all that wait, by ordinal.
            count: how many are wanted.
            version: of the step's weights.
            selected: groups taken since the start of the run.
            origin: see ``limit``.
        """
        if self.in_order:
            return [group.ordinal for group in takewhile(lambda group: group.finished, groups)][:count]
        if self.policy == "drop":
            return [g.ordinal for g in groups if g.finished and version - g.oldest_version <= self.max_staleness][
                :count
            ]
        due = Counter(max(group.dispatched + self.max_staleness, version) for group in groups)
        room = (version + 1) * self.batch + origin - selected  # left in this version's batch
        chosen: list[int] = []
        for group in (g for g in groups if g.finished):
            mine = max(group.dispatched + self.max_staleness, version)
            left, fits = 0, True
            for by in sorted(due):
                if by >= mine:
                    break
                left += due[by]
                fits = fits and left < room + (by - version) * self.batch - len(chosen)
            if len(chosen) == count or not fits:
                break
            chosen.append(group.ordinal)
            due[mine] -= 1
        return chosen

    def expired(self, groups: Iterable[Standing], version: int) -> list[int]:
        """Return the ordinals of finished groups that are too old to be trained with the weights of ``version``."""
        if self.policy != "drop":
            return []
        return [g.ordinal for g in groups if g.finished and version - g.oldest_version > self.max_staleness]
