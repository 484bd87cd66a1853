"""What the pickle reader builds: inert records and names, never objects of the classes that a pickle speaks of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.keys.tensor_file import TensorFileError

Maker = Callable[..., Any]


class PickleError(TensorFileError):
    """A pickle is damaged, or holds something that is not on the list of what may be read."""


@dataclass(eq=False)
class Record:
    """An object of the pickle, as data: its dotted class name, constructor arguments, state and items."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return attribute ``key`` of the object's state, or ``default``."""
        return attributes(self.state).get(key, default)


@dataclass(frozen=True, eq=False)
class Global:
    """A class or function that the pickle names; ``make`` is ours and builds an inert value from arguments."""

    name: str
    make: Maker


def record(name: str) -> Maker:
    """Return a maker of Records called ``name``."""
    return lambda *args: Record(name, args)


def attributes(state: Any) -> dict[Any, Any]:
    """Return an object's attributes out of its pickled state: a dict, or a pair of ``__dict__`` and slots."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
