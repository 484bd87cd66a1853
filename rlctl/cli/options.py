"""The options that every command has, stated once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

_PARAMETERS: dict[str, tuple[Any, Any]] = {
    "json": (
        Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")],
        False,
    ),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
    "verbose": (
        Annotated[
            int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; twice for debugging.")
        ],
        0,
    ),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Say warnings and errors only.")], False),
    "color": (
        Annotated[Literal["auto", "always", "never"], typer.Option("--color", help="When to use colours.")],
        "auto",
    ),
}


@dataclass(frozen=True)
class SharedOptions:
    """Values of the options that every command has."""

    json: bool
    debug: bool
    verbose: int
    quiet: bool
    color: Literal["auto", "always", "never"]

    @property
    def verbosity(self) -> int:
        """-1 for ``--quiet``, else how often ``--verbose`` was given."""
        return -1 if self.quiet else self.verbose


def shared_parameters() -> list[inspect.Parameter]:
    """Return the shared options as parameters of a function that typer can read."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in _PARAMETERS.items()
    ]


def take_shared(values: dict[str, Any]) -> SharedOptions:
    """Remove the shared options from a command's values and return them."""
    return SharedOptions(**{name: values.pop(name) for name in _PARAMETERS})
