"""Rewards by comparing a response with an answer, and where to find other people's.

A verifier is a function of (prompt, response, answer), all text, that returns a number, or a mapping with ``reward``
and further numbers for averages. The built-in ones judge what stands after the last ``</think>``, if there is one.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.registry import Registry
from rlctl.tasks.final_part import final_part
from rlctl.tasks.numbers import TOLERANCE, equal, last_number

Verifier = Callable[[str, str, str], Any]

VERIFIERS: Registry[Verifier] = Registry(
    "verifier",
    {
        **{name: f"rlctl.tasks.verifiers:{name}" for name in ("exact", "numeric", "regex", "contains")},
        "json_schema": "rlctl.tasks.json_schema:json_schema",
        "math": "rlctl.tasks.mathematics:math",
    },
)
NONE = "none"
"""Stands for a verifier where a reward model alone judges: every reward is 0, and no answer is needed."""
IN_A_CHILD = ("regex", "json_schema", "math")
"""Built-in verifiers that an answer or a response can keep busy for ever; only the end of its process stops one."""


def exact(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1.0 if the final part is the answer, up to white space around."""
    return float(final_part(response) == answer.strip())


def none(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """0.0."""
    return 0.0


def contains(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1.0 if the final part contains the answer."""
    return float(answer.strip() in final_part(response))


def numeric(prompt: str, response: str, answer: str, tolerance: float = TOLERANCE) -> float:  # noqa: ARG001
    """1.0 if the last number of the final part equals the answer's last number to a relative ``tolerance``."""
    expected = last_number(answer)
    found = last_number(final_part(response))
    return float(expected is not None and found is not None and equal(expected, found, tolerance))


def regex(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1.0 if the answer, a regular expression, is found in the final part."""
    return float(re.search(answer, final_part(response)) is not None)


def check_reference(reference: str, where: str = "task.verifier") -> str:
    """Return ``reference`` (``module:function`` or ``file.py:function``) in a form that does not depend on where a
    process stands. Nothing is imported. Raises UsageError if it cannot be one."""
    place, _, function = reference.rpartition(":")
    fix = "write module:function or path/to/file.py:function"
    if not place or not function.isidentifier():
        raise UsageError(f"{reference!r} does not name a function", where=where, fix=fix)
    if not place.endswith(".py"):
        return reference
    path = Path(place)
    if not path.is_file():
        raise UsageError(f"there is no file {place}", where=where, fix=fix)
    return f"{path.resolve()}:{function}"


TAKES = ("prompt", "response", "answer")
STEP_TAKES = ("messages", "answer")


def load_verifier(reference: str) -> Verifier:
    """Import the verifier behind ``reference``. Raises as ``load_function``."""
    return load_function(reference, TAKES)


def load_function(reference: str, takes: Sequence[str]) -> Callable[..., Any]:
    """Import the function behind ``reference``.

    Raises:
        UsageError: there is no such function, or it does not take arguments like ``takes``.
        Exception: whatever the import raises.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        # The file may import its neighbours, as it could when run as a script.
        sys.path.insert(0, str(Path(place).parent))
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        module = import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}")
    try:
        inspect.signature(function).bind(*takes)
    except TypeError as error:
        raise UsageError(f"{name} cannot be called with ({', '.join(takes)}): {error}") from error
    found: Callable[..., Any] = function
    return found
