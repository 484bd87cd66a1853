"""Which replicas hold the base that an adapter alone is added to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Bases:
    """Says before each sync whether the base goes along: it does, to all, when one of them lacks it.

    Args:
        say: tells the trainer's ranks.
    """

    def __init__(self, say: Callable[[bool], None]) -> None:
        self._say = say
        self._said: bool | None = None
        self._held: set[str] = set()

    def before(self, replicas: Collection[str], died: Iterable[str]) -> None:
        """These are synced next; ``died`` lost what they held."""
        self._held -= set(died)
        with_base = not self._held.issuperset(replicas)
        if with_base != self._said:
            self._say(with_base)
            self._said = with_base

    def after(self, committed: Iterable[str], fenced: Iterable[str]) -> None:
        """These took all of the sync; those may hold anything."""
        self._held = (self._held - set(fenced)) | set(committed)
