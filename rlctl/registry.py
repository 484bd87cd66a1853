"""Tables of name -> implementation, so that a typo gets a suggestion without importing anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from rlctl.errors import UsageError

T = TypeVar("T")


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to ``word``, or None when nothing is near."""
    lower, names = word.lower(), {name.lower(): name for name in known}
    near = difflib.get_close_matches(lower, names, n=1, cutoff=0.6)
    if not near and len(lower) > 1:
        near = [name for name in names if name.startswith(lower)]
    return names[near[0]] if near else None


class Registry(Generic[T]):
    """Names of one kind of thing: built in (``"module:Class"``, imported on first use), registered at run time, or
    offered by other packages under an entry-point group.

    Args:
        kind: what the things are, as a user would say it ("trainer mode").
        builtin: name -> ``"module:attribute"``.
        group: entry-point group for other people's packages, or None.
        base: ``"module:Class"`` that every entry must be a subclass of, or None.
    """

    def __init__(
        self, kind: str, builtin: Mapping[str, str], *, group: str | None = None, base: str | None = None
    ) -> None:
        self.kind = kind
        self._builtin = dict(builtin)
        self._group = group
        self._base = base
        self._registered: dict[str, T] = {}
        self._foreign: dict[str, Any] | None = None

    def names(self) -> list[str]:
        """Return every known name, built-in ones first."""
        foreign = [n for n in self._entry_points() if n not in self._builtin]
        return [*self._builtin, *(n for n in (*self._registered, *foreign) if n not in self._builtin)]

    def register(self, name: str, thing: T) -> T:
        """Add ``thing`` under ``name``; the same thing twice is fine, another under a taken name is an error."""
        self._check_base(name, thing)
        taken = self._registered.get(name)
        if (taken is not None and taken is not thing) or (
            taken is None and name in self._builtin and not self._is_builtin(name, thing)
        ):
            raise UsageError(f"{self.kind} {name!r} is registered already")
        self._registered[name] = thing
        return thing

    def load(self, name: str, *, where: str | None = None) -> T:
        """Return the thing called ``name``, importing it if need be. Raises UsageError with a suggestion."""
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            thing = _resolve(self._builtin[name])
        elif name in self._entry_points():
            thing = self._entry_points()[name].load()
        else:
            raise self.unknown(name, where=where)
        self._check_base(name, thing)
        self._registered[name] = thing
        return self._registered[name]

    def unknown(self, name: str, *, where: str | None = None) -> UsageError:
        """Return the error for a name that is not in the table."""
        near = suggest(name, self.names())
        hint = f"did you mean {near!r}? " if near else ""
        return UsageError(f"unknown {self.kind} {name!r}", where=where, fix=f"{hint}known: {', '.join(self.names())}")

    def _entry_points(self) -> dict[str, Any]:
        if self._group is None:
            return {}
        if self._foreign is None:
            from importlib.metadata import entry_points  # half of the time of reading a configuration

            self._foreign = {e.name: e for e in entry_points(group=self._group)}
        return self._foreign

    def _is_builtin(self, name: str, thing: object) -> bool:
        module, _, attribute = self._builtin[name].partition(":")
        return getattr(thing, "__module__", None) == module and getattr(thing, "__qualname__", None) == attribute

    def _check_base(self, name: str, thing: object) -> None:
        if self._base is None:
            return
        base = _resolve(self._base)
        if not (isinstance(thing, type) and issubclass(thing, base)):
            raise UsageError(f"{self.kind} {name!r} must be a subclass of {base.__name__}")


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
